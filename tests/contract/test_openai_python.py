"""The official Python client, unmodified, against a running server."""

from collections.abc import Iterator

import openai
import pytest

from tests.platform_harness import Platform, platform


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with platform(tmp_path_factory.mktemp("contract")) as running:
        yield running


@pytest.fixture
def client(served: Platform) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["stub"]
    assert client.models.retrieve("stub").owned_by == "headrace"


def test_a_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=5, seed=1
    )
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage
    assert reply.usage.completion_tokens == 5
    assert reply.id.startswith("chatcmpl-")


def test_a_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="stub",
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            ],
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])


def test_errors_become_the_clients_own(served: Platform, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi " * 9000}]
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model="stub", messages=messages)  # type: ignore[arg-type]
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=2) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert refused.value.request_id
    assert refused.value.response.headers["x-should-retry"] == "false"


def test_leaving_a_stream_early_is_noticed(served: Platform, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": "Hello"}], stream=True
    )
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": "Again"}], max_tokens=1
    ).choices
    assert served.process.poll() is None

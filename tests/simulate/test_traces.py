"""Readers of traces."""

import pytest

from headrace.simulate.traces import TraceError, read


def test_azure() -> None:
    found = read(
        [
            "TIMESTAMP,ContextTokens,GeneratedTokens\n",
            "2023-11-16 18:15:46.6805900,374,44\n",
            "2023-11-16 18:15:50.9951690,396,109\n",
        ],
        name="x.csv",
        tenant="conv",
    )
    assert [(one.arrival_us, one.tenant, one.prompt_tokens, one.output_tokens) for one in found] == [
        (0, "conv", 374, 44),
        (4_314_579, "conv", 396, 109),
    ]


def test_azure_with_a_zone() -> None:
    """As the traces of 2024 have it. Where zones differ, the times are what they mean."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens\n", "2024-05-10 00:00:00.5+00:00,1,2\n", "2024-05-10 01:00:01+01:00,3,4\n"]  # fmt: skip
    assert [one.arrival_us for one in read(lines, name="x.csv")] == [0, 500_000]


def test_mooncake() -> None:
    line = '{"timestamp": 27, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    (one,) = read([line], name="x.jsonl")
    assert (one.arrival_us, one.prompt_tokens, one.output_tokens, one.blocks) == (0, 6758, 500, (0, 1))


def test_burst_leaves_out_what_failed() -> None:
    found = read(
        [
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
            "5,ChatGPT,472,18,490,Conversation log\n",
            "6,GPT-4,472,0,472,Conversation log\n",
            "7.5,GPT-4,1,2,3,Conversation log\n",
        ],
        name="burst.csv",
    )
    assert [(one.arrival_us, one.tenant, one.output_tokens) for one in found] == [
        (0, "ChatGPT", 18),
        (2_500_000, "GPT-4", 2),
    ]


def test_token_fairness_in_order_of_time() -> None:
    found = read(["req_time_s,client,prompt_len,output_len\n", "2.5,7,3,4\n", "0.5,13,1,2\n"], name="vtc.csv")
    assert [(one.arrival_us, one.tenant) for one in found] == [(0, "13"), (2_000_000, "7")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "log: is empty; known are Azure"),
        (["a,b\n"], "no known trace"),
        (["req_time_s,client,prompt_len,output_len\n"], "has no requests"),
        (["req_time_s,client,prompt_len,output_len\n", "1,2,3,4\n", "1,2,x,4\n"], "log: line 3: prompt_len is 'x', not a whole number"),
        (["req_time_s,client,prompt_len,output_len\n", "inf,2,3,4\n"], "line 2: req_time_s is 'inf', not a time"),
        (["req_time_s,client,prompt_len,output_len\n", "nan,2,3,4\n"], "line 2: req_time_s is 'nan', not a time"),
        (["req_time_s,client,prompt_len,output_len\n", "soon,2,3,4\n"], "line 2: req_time_s is 'soon', not a time"),
        (["req_time_s,client,prompt_len,output_len\n", "1e300,2,3,4\n"], "a time more than 4,000,000,000 s from 0"),
        (["req_time_s,client,prompt_len,output_len\n", "0,2,3,4\n", "2e8,2,3,4\n"], "more than 100,000,000 s after"),
        (["req_time_s,client,prompt_len,output_len\n", "1,2,3\n"], "line 2: output_len is missing"),
        (["req_time_s,client,prompt_len,output_len\n", "1,,3,4\n"], "line 2: client is missing"),
        (["req_time_s,client,prompt_len,output_len\n", "1,2,3,10000001\n"], "more than 10,000,000 tokens"),
        (["req_time_s,client,prompt_len,output_len\n", f"1,{'c' * 200_000},3,4\n"], "line 2: field larger than"),
        (['{"timestamp":1,"input_length":1,"output_length":1}\n', "{bad\n"], "log: line 2: JSON is malformed"),
        (["req_time_s,client,prompt_len,output_len\n", "1,2,-3,4\n"], "cannot be negative"),
        (['{"timestamp": 1}\n'], "line 1: .*input_length"),
        (['{"arrival_us":1,"tenant":"t","prompt_tokens":1,"output_tokens":1,"service_class":"x"}\n'], "allowed are"),
        (['{"arrival_us":1,"tenant":"t","prompt_tokens":1,"output_tokens":1,"weight":0}\n'], "positive"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens\n", "yesterday,1,2\n"], "line 2: TIMESTAMP is 'yesterday', not like"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens\n", "0001-01-01 00:00+23:00,1,2\n"], "line 2: TIMESTAMP is"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(lines, name="log")

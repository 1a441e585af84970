"""`headrace worker`: one worker process by hand, for looking into an engine without a gateway."""

import sys
import tempfile
from pathlib import Path

import click

from headrace.config.settings import EngineLibrary, EngineSettings
from headrace.errors import HeadraceError


@click.command()
@click.option("--model", "model_path", type=str, help="A GGUF file.  [default: the built-in model]")
@click.option("--socket", type=click.Path(path_type=Path), help="Unix socket to listen on.")
@click.option("--cache", type=click.Path(path_type=Path), help="Directory for converted weights.")
@click.option("--batch-size", type=click.IntRange(1, 256), default=32, show_default=True)
@click.option("--context", type=click.IntRange(64, 1_048_576), default=2048, show_default=True)
@click.option("--threads", type=click.IntRange(1, 512), help="Compute threads.  [default: cores - 1]")
@click.option("--library", type=click.Choice(["wheel", "native"]), default="wheel", show_default=True)
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=0, help="0 takes a free port.")
@click.option("--log-format", type=click.Choice(["json", "console"]), default="console")
def worker(
    model_path: str | None,
    socket: Path | None,
    cache: Path | None,
    batch_size: int,
    context: int,
    threads: int | None,
    library: EngineLibrary,
    metrics_port: int,
    log_format: str,
) -> None:
    """Run one worker until Ctrl-C. `serve` starts and watches its own; this is for looking into one."""
    from headrace.engine.builtin import builtin_model_path
    from headrace.worker.process import WorkerOrders, run_worker

    with tempfile.TemporaryDirectory(prefix="headrace-worker-") as scratch:
        orders = WorkerOrders(
            worker_id="worker",
            model_path=model_path or str(builtin_model_path()),
            engine=EngineSettings(
                max_batch_size=batch_size, max_context_tokens=context, threads=threads, library=library
            ),
            socket=str(socket or Path(scratch) / "worker.sock"),
            progress=str(Path(scratch) / "progress"),
            parking=str(Path(scratch) / "kv"),
            cache=str(cache or Path(scratch)),
            metrics_port=metrics_port,
            log_format=log_format,
            is_child=False,
        )
        try:
            status = run_worker(orders)
        except HeadraceError as error:
            click.echo(f"headrace: {error}", err=True)
            status = 2
    sys.exit(status)

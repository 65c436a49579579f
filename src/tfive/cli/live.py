"""Training with the run's page served beside it: `tfive train --page` and `tfive resume --page`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tfive.cli.report import report_command
from tfive.cli.watch import served
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.training.start import default_folder, resume_command, run_command


def train_with_page(
    sources: Sequence[str],
    overrides: Sequence[str],
    out: str | None,
    *,
    as_json: bool,
    quiet: bool,
    trust_remote_code: bool = False,
) -> str | None:
    """What `tfive train --page` does; returns the last line to print, if any."""
    folder = Path(out) if out else default_folder(Config.load(*sources, overrides=overrides))
    with _page_of(folder):
        return run_command(sources, overrides, out, as_json=as_json, quiet=quiet, trust_remote_code=trust_remote_code)


def resume_with_page(folder: str, **options: bool) -> str | None:
    """What `tfive resume --page` does; returns the last line to print, if any."""
    with _page_of(Path(folder)):
        return resume_command(folder, **options)


@contextmanager
def _page_of(folder: Path) -> Iterator[None]:
    """Serve a run's page while it trains; however it ends, the page is written at the end."""
    refused = False
    with served(folder) as address:
        print(f"page: {address}", file=sys.stderr, flush=True)
        try:
            yield
        except UserError:
            refused = True
            raise
        finally:
            if not refused and folder.is_dir():
                written = report_command([str(folder)], as_json=False).splitlines()[-1]
                print(f"page written to {written}", file=sys.stderr, flush=True)

"""Several processes on this machine: torch's elastic agent starts them, watches them, and starts them again.

The agent is torchrun's own. What differs: a refusal (status 2) or failed work (status 1) is not tried again, because it
would come out the same; statuses pass through; and what happened is said in a line instead of a report.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tfive.cli.options import fail
from tfive.config.config import Config
from tfive.distributed.environment import CRASHED, LOST, launched
from tfive.distributed.ports import free_port
from tfive.errors import UserError
from tfive.training.console import Console
from tfive.training.devices import usable_cores
from tfive.training.memory import readable_bytes
from tfive.training.memory_limits import device_memory
from tfive.training.processes import require_possible
from tfive.training.run_folder import read_config

FINAL = (2, 1, 130)
"""Statuses that a restart would only repeat, the most telling first: a refusal, failed work, an interruption."""

TFIVE = ("-P", "-m", "tfive")
"""What Python runs; `-P` keeps files of the working folder from standing in for packages."""

RESUME = "go on with tfive resume"

LIBRARIES = 280 << 20
"""Bytes that a process takes before it loads anything: torch, transformers and what they need."""

SAVING = 30.0
"""Seconds that an evaluation has to end after a signal."""

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def started_by_launcher(processes: int, page: bool = False) -> bool:
    """Whether this is one of the processes that `--processes` asks for, and not the one to start them."""
    if page:
        raise UserError("--page: it is served by one process; leave it out and look with tfive watch DIR")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        launched()  # half an environment is refused here already
        return False
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local != processes:
        raise UserError(
            f"--processes {processes}: a launcher has started {local} a node already; leave --processes out"
        )
    return True


def launch_train(
    sources: Sequence[str],
    overrides: Sequence[str],
    out: str | None,
    flags: Mapping[str, bool],
    processes: int,
    restarts: int,
) -> int:
    """`tfive train` in several processes; what is refused of a configuration, or of it by so many processes, is refused
    here, before any begins."""
    config = Config.load(*sources, overrides=overrides)
    words = ["train", *sources, *(word for one in overrides for word in ("--set", one))]
    words += ["--out", out] if out else []
    return _launched(_with(words, flags), config, processes, restarts, quiet=flags["quiet"])


def launch_resume(folder: str, flags: Mapping[str, bool], processes: int, restarts: int) -> int:
    """`tfive resume` in several processes."""
    config = read_config(Path(folder))
    return _launched(_with(["resume", folder], flags), config, processes, restarts, quiet=flags["quiet"])


def launch_again(context: Any, processes: int, *, quiet: bool) -> int:
    """The command that is being called (its `typer.Context`), in several processes; nothing is kept of one that dies,
    so none is started again."""
    words = command_words(context)
    return launch(words, processes=processes, restarts=0, patience=SAVING, quiet=quiet, then="give the command again")


def command_words(context: Any) -> list[str]:
    """What was typed for a command, with every option that has a value written out."""
    names: list[str] = []
    here = context
    while here.parent is not None:
        names.insert(0, str(here.info_name))
        here = here.parent
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.param_type_name == "argument":
            names.append(str(value))
        elif isinstance(value, bool):
            names += [parameter.opts[0]] * value
        elif value is not None:
            several = value if isinstance(value, list | tuple) else [value]
            names += [f"{parameter.opts[0]}={one}" for one in several]
    return names


def _launched(words: Sequence[str], config: Config, processes: int, restarts: int, *, quiet: bool) -> int:
    require_possible(config, processes)
    patience = config.distributed.timeout
    return launch(words, processes=processes, restarts=restarts, patience=patience, quiet=quiet)


def _with(words: Sequence[str], flags: Mapping[str, bool]) -> list[str]:
    named = (name.removeprefix("as_").replace("_", "-") for name, given in flags.items() if given)
    return [*words, *(f"--{name}" for name in named)]


def launch(
    arguments: Sequence[str],
    *,
    processes: int,
    restarts: int,
    patience: float,
    quiet: bool = False,
    then: str = RESUME,
    program: Sequence[str] = TFIVE,
) -> int:
    """Run `tfive ARGUMENTS` in several processes of this machine; returns the status of the whole.

    `restarts`: how often ranks that died are started again. `patience`: seconds for ranks to save after a signal.
    `then`: what a person can do when no restart is left.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    require_memory(processes, device_memory(torch.device("cpu")))
    for name, value in _settings(processes).items():
        os.environ.setdefault(name, value)
    logging.disable(logging.CRITICAL)  # of this process alone: what its agent meets is said in a line of ours
    place = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
    )
    spec = WorkerSpec(
        role="tfive",
        local_world_size=processes,
        entrypoint=sys.executable,
        args=(*program, *arguments),
        rdzv_handler=get_rendezvous_handler(place),
        max_restarts=restarts,
        local_addr="localhost",
    )
    asked = ""
    # Where the agent keeps what a rank that dies leaves for it; gone when all have ended.
    with tempfile.TemporaryDirectory(prefix="tfive-ranks-", ignore_cleanup_errors=True) as kept:
        console = Console(quiet=quiet)
        console.say(f"starting {processes} processes, each of which loads its libraries first")
        agent = _agent_class()(spec, DefaultLogsSpecs(kept), console, round(patience), then)
        try:
            agent.run()
        except Exception as error:
            # Where a signal comes as torch begins to time a function of its own, another error comes out of that.
            stop = error if isinstance(error, SignalException) else error.__context__
            if not isinstance(stop, SignalException):
                raise
            agent.kill()  # those that did not save in time, or after a second signal
            asked = stop.sigval.name
        finally:
            spec.rdzv_handler.shutdown()
    status = whole_status(agent.statuses())
    if asked and status and not any(one in FINAL for one in agent.statuses()):
        # Whoever saves and stops says so; these were loading, or in the middle of an evaluation.
        return fail(f"{asked}: all ranks have ended; {then}", status)
    return status


def require_memory(processes: int, there: int | None) -> None:
    """Refuse so many processes that their libraries alone do not fit into the machine, which would come to a halt."""
    if there is not None and processes * LIBRARIES > there:
        raise UserError(
            f"--processes {processes}: their libraries alone take {readable_bytes(processes * LIBRARIES)}, this "
            f"machine has {readable_bytes(there)}; start fewer, one a GPU or core"
        )


def _settings(processes: int) -> dict[str, str]:
    """What the processes inherit unless a person has set it: their share of the cores, a store of their own at every
    attempt (addresses in a store that outlives an attempt are those of dead processes), which signals to pass on, that
    they talk inside this machine, and that torch is silent about connections which another process's end closes."""
    heard = [name for name in SIGNALS if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
    return {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // processes)),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(heard),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def _agent_class() -> Any:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsSpecs

    class Agent(LocalElasticAgent):
        """torchrun's agent, except that it tells what a restart can mend from what it cannot."""

        def __init__(self, spec: WorkerSpec, logs: LogsSpecs, console: Console, patience: int, then: str) -> None:
            super().__init__(spec, logs, shutdown_timeout=patience)
            self._console, self._then = console, then

        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            worker_group.spec.master_port = free_port()  # another one at every attempt; None leaves it to torch
            super()._rendezvous(worker_group)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state is WorkerState.FAILED:
                ended = {rank: failure.exitcode for rank, failure in result.failures.items()}
                if any(status in FINAL for status in ended.values()):
                    self._remaining_restarts = 0
                else:
                    count = worker_group.spec.max_restarts - self._remaining_restarts
                    self._console.say(restart_line(ended, count, worker_group.spec.max_restarts, self._then))
            return result

        def kill(self) -> None:
            """End every process that is still there, at once."""
            self._shutdown(signal.SIGKILL)

        def statuses(self) -> list[int | None]:
            """How each process ended; none where none was started."""
            handlers = getattr(self._pcontext, "subprocess_handlers", {})
            return [handler.proc.poll() for handler in handlers.values()]

    return Agent


def whole_status(statuses: Sequence[int | None]) -> int:
    """The status of several processes together: a refusal before failed work before an interruption before a death."""
    ended = [status for status in statuses if status != 0]
    return next((status for status in FINAL if status in ended), 1 if ended or not statuses else 0)


def restart_line(ended: Mapping[int, int], count: int, most: int, then: str = RESUME) -> str:
    """Which rank died of what, and what comes of it; ranks that only followed it are not named."""
    followed = (LOST, -signal.SIGTERM)
    causes = {rank: status for rank, status in ended.items() if status not in followed} or dict(ended)
    told = ", ".join(f"rank {rank} {_ending(status)}" for rank, status in sorted(causes.items()))
    if count < most:
        return f"{told}; starting all ranks again from the newest checkpoint ({count + 1} of {most} restarts)"
    return f"{told}; no restart is left of {most}; {then}" if most else f"{told}; {then}"


def _ending(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return {LOST: "lost another rank", CRASHED: "crashed"}.get(status, f"ended with status {status}")

"""The commands of an operator, most of them rows over `vlora.operations`; and their results as text."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from vlora import operations as op
from vlora.cli.group import Group, cli
from vlora.cli.options import WAIT, command, flag, given, long_flag, print_json
from vlora.cli.progress import waiting
from vlora.errors import BadRequest
from vlora.types import AdapterStatus, EngineStats, TrainingStatus
from vlora.types.camera import CameraStatus
from vlora.types.learning import AdapterVersion, Comparison, LearningStatus
from vlora.types.replicas import AdapterPlace, ClusterStatus

if TYPE_CHECKING:
    from vlora.client import Client

_PATHS = ("path", "plan")  # fields that are paths: relative ones start at the current folder
_VERSION = "A version on disk; its first digits suffice. Default: "
_KERNELS = {"compiled": "compiled C++", "plain torch": "plain torch (slower): no working C++ compiler found"}


def _show(found: Any, as_json: bool, none: str = "") -> None:
    """Print a status, or each of a tuple."""
    several = found if isinstance(found, tuple) else (found,)
    for each in several:
        if as_json:
            print_json(each)
        else:
            for line in _LINES[type(each)](each):
                click.echo(line)
    if not several and none and not as_json:
        click.echo(none)


# -- adapters ---------------------------------------------------------------------------------------------------------


@command(cli, cls=Group, invoke_without_command=True)
def adapters(client: Client, as_json: bool) -> None:
    """List the adapters of a server with their domains and heads, or load, unload, pin and unpin one.

    \b
        vlora adapters --json
        vlora adapters load signs /srv/adapters/signs

    If the server requires tokens, changes require an admin token in VLORA_TOKEN.
    """
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        with client:
            _show(client.adapters(), as_json, "no adapters")
        return
    for option in context.command.params:
        if isinstance(option, click.Option) and given(option.name or ""):
            raise click.UsageError(f"write --{long_flag(option)} after {context.invoked_subcommand!r}", context)


def _adapter(adapter: AdapterStatus) -> Iterator[str]:
    merge = "mergeable" if adapter.mergeable else "never merged"
    if not adapter.loaded:
        merge = f"cannot be served: {adapter.error}" if adapter.error else "read at first use"
    pinned = "  pinned" if adapter.pinned else ""
    yield f"{adapter.name}  rank {adapter.rank}  {adapter.num_bytes / 2**20:.1f} MiB  {merge}{pinned}"
    if adapter.loaded and adapter.error:
        yield f"  not everywhere: {adapter.error}"
    for warning in adapter.warnings:
        yield f"  warning: {warning}"
    for domain in adapter.domains:
        scores = {"head": domain.head_accuracy, "words": domain.words_accuracy}
        how = ", ".join(f"{way} {score:.3f}" for way, score in scores.items() if score is not None)
        yield f"  domain {domain.name}  by {domain.answer}" + (f" ({how})" if how else "")
    for head in adapter.heads:
        frames = f"{head.num_frames} frame{'s' * (head.num_frames != 1)}"
        yield f"  head {head.name}  {head.task} over {frames}: {', '.join(head.labels)}"


# -- trainings --------------------------------------------------------------------------------------------------------


@cli.group()
def train() -> None:
    """Train adapters in a running server, beside its requests.

    \b
        vlora train submit plan.yaml
        vlora train status
        vlora train cancel signs
        vlora train versions signs

    If the server requires tokens, changes require an admin token in VLORA_TOKEN.
    """


@command(train)
@click.argument("name")
def versions(name: str, client: Client, as_json: bool) -> None:
    """List the versions of the learning adapter NAME, the newest first.

    \b
        vlora train versions signs
    """
    with client:
        found = {one.name: one for one in client.learning()}
    if name not in found:
        raise BadRequest(f"adapter {name!r} does not learn; learning: {', '.join(found) or 'none'}")
    _show(found[name], as_json)


def _learning(status: LearningStatus) -> Iterator[str]:
    left = "" if status.until_training is None else f", {status.until_training} until the next training"
    yield f"{status.name}  {status.doing}  {status.num_corrected} corrections{left}"
    for one in status.versions:
        yield f"  {_described(one)}"


def _described(version: AdapterVersion) -> str:
    parts = [f"{version.version[:12]}  {version.state}", *([version.origin] if version.origin else [])]
    for what, compared in (("live", version.live), ("trusted", version.trusted)):
        if compared is not None and compared.count:
            parts.append(f"{what} {_shares(compared)}")
    if version.num_answers:
        parts.append(f"{version.num_wrong} of {version.num_answers} answers corrected")
    return "  ".join(parts)


def _shares(compared: Comparison) -> str:
    return (
        f"{compared.candidate_share:.3f} (bound {compared.lower:.3f}) against {compared.present_share:.3f} "
        f"on {compared.count}"
    )


def _training(status: TrainingStatus) -> Iterator[str]:
    parts = [f"{status.name}  {status.state}", f"step {status.step} of {status.num_steps}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.held_out_before is not None:
        after = "" if status.held_out_after is None else f", after {status.held_out_after:.4f}"
        parts.append(f"held out before {status.held_out_before:.4f}{after}")
    if status.num_bad:
        parts.append(f"{status.num_bad} records set aside")
    if reason := status.error or status.waiting:
        parts.append(reason)
    yield "  ".join(parts)
    for reason in status.bad:
        yield f"  set aside: {reason}"
    if status.bad and status.num_bad > len(status.bad):
        yield f"  and {status.num_bad - len(status.bad)} more"


# -- the server, its replicas -----------------------------------------------------------------------------------------


@command(cli)
def status(wait_s: float = WAIT, *, client: Client, as_json: bool) -> None:
    """Show a server's requests, modes, memory and adapters.

    \b
        vlora status
        watch vlora status
        vlora status --wait-s 60    # wait up to a minute until it serves; exit code 2 on timeout
    """
    from vlora.client import wait_for_server

    with client, waiting("waiting for the server"):
        wait_for_server(client, wait_s)
        stats = client.stats()
    _show(stats, as_json)


def _stats(stats: EngineStats) -> Iterator[str]:
    mib = 2**20
    modes = ", ".join(f"{mode} {count}" for mode, count in sorted(stats.steps_by_mode.items())) or "none yet"
    for name, value in (
        ("requests", f"{stats.num_running} running, {stats.num_waiting} waiting"),
        ("ended", f"{stats.num_finished} finished, {stats.num_failed} failed, {stats.num_cancelled} cancelled"),
        ("steps", modes),
        ("switches", f"{stats.num_switches} in {stats.switch_s:.2f} s"),
        (
            "arena",
            f"{stats.arena_bytes / mib:.0f} MiB: adapters {stats.adapter_bytes / mib:.0f}, KV in use "
            f"{stats.kv_bytes / mib:.0f}, KV cached {stats.cached_kv_bytes / mib:.0f}",
        ),
        *([("sized by", stats.arena_basis)] if stats.arena_basis else ()),
        ("threads", str(stats.num_threads)),
        ("adapters", f"{stats.num_resident_adapters} of {stats.num_adapters} on the device"),
        ("preempted", str(stats.num_preemptions)),
        ("ATMM table", stats.atmm_table or "unknown"),
        *([("kernels", _KERNELS.get(stats.cpu_kernels, stats.cpu_kernels))] if stats.cpu_kernels else ()),
    ):
        yield f"{name:<10} {value}"


@cli.group()
def cluster() -> None:
    """Show, drain, resume and scale the replicas of a server that was started with --replicas or --ray.

    \b
        vlora cluster status
        vlora cluster drain replica-0

    If the server requires tokens, changes require an admin token in VLORA_TOKEN.
    """


@command(cluster, "status")
def cluster_status(
    of_adapters: bool = flag(False, "Show where each adapter is, and why it cannot be used.", "--adapters"),
    *,
    client: Client,
    as_json: bool,
) -> None:
    """Show the replicas, their queue, and what happened to requests; or the adapters of each replica.

    \b
        vlora cluster status --json
        vlora cluster status --adapters

    An adapter is pending on a replica that is not as desired yet, also while its files are sent there, registered until
    its content is read, then in the memory of the host or of the device. A replica that has failed an adapter gets no
    requests of it, and tries again.
    """
    with client:
        found = client.cluster_adapters() if of_adapters else client.cluster()
    print_json(found) if as_json else _show(found, as_json)


def _number_or_auto(value: str) -> int | Literal["auto"]:
    if value != "auto" and not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a number nor auto.")
    return "auto" if value == "auto" else int(value)


@command(cluster)
@click.argument("number", type=_number_or_auto)
def scale(number: int | Literal["auto"], client: Client, as_json: bool) -> None:
    """Have NUMBER replicas, at most --replicas LEAST:MOST of the server, or let the load decide.

    \b
        vlora cluster scale 3
        vlora cluster scale auto

    A number holds until the next call, whatever the load; auto begins with the present number, and keeps at least
    LEAST.

    Further ones are started. The last ones are drained, and end once they have no requests. An interrupt ends the wait,
    and leaves what drains drained; another number then resumes it. The wait ends with an error if another call sets
    another number meanwhile.
    """
    with client, waiting(f"scaling to {number}"):
        while not client.scale(number):
            scaling = client.cluster().scaling
            if scaling is not None and (scaling.automatic or scaling.number != number):
                who = "automatically" if scaling.automatic else "by an operator"
                raise BadRequest(
                    f"the change to {_counted(int(number), 'replica')} was replaced by another one: "
                    f"{_counted(scaling.number, 'replica')}, set {who}"
                )
    if as_json:
        print_json({"num_replicas": number})
    else:
        click.echo("automatic" if number == "auto" else _counted(number, "replica"))


def _cluster(found: ClusterStatus) -> Iterator[str]:
    for replica in found.replicas:
        text = replica.cause or _counted(replica.num_requests, "request")
        if replica.num_failed_adapters:
            text += f"  {_counted(replica.num_failed_adapters, 'adapter')} failed, see --adapters"
        place = f"  {replica.address} (node {replica.node[:8]}, actor {replica.actor[:8]}, process {replica.pid})"
        yield f"{replica.name}  {replica.state}  {text}{place if replica.address else ''}"
    yield (
        f"{_counted(found.num_waiting, 'request')} waiting; since the start "
        f"{_counted(found.num_deaths, 'replica')} lost, {found.num_resubmitted} resubmitted, {found.num_moves} moved"
    )
    if (scaling := found.scaling) is not None:
        who = "automatically" if scaling.automatic else "by operators"
        yield f"scaled {who}: {_counted(scaling.number, 'replica')}, {scaling.least} to {scaling.most}"
        if scaling.decided_s is not None:
            yield f"last change {scaling.decided_s:.0f} s ago: {scaling.decision}"
        if scaling.problem:
            yield scaling.problem


def _place(place: AdapterPlace) -> Iterator[str]:
    shown = [place.adapter, place.replica, place.state, place.version, "pinned" * place.pinned, place.cause]
    yield "  ".join(filter(None, shown))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


@cli.group()
def cameras() -> None:
    """List the cameras that a server reads, or add, pause, resume and remove them.

    \b
        vlora cameras add plan.yaml
    """


@command(cameras, "add", needs="plans")
@click.argument("plan")
def add_cameras(plan: str, client: Client, as_json: bool) -> None:
    """Add or change the cameras of the file PLAN of `vlora stream`; paths are of the server's machine.

    \b
        vlora cameras add plan.yaml
    """
    from apps.video_analytics.plan.plan_file import CameraPlan, read_plan

    found = [each.model_dump(mode="json", exclude_unset=True) for each in read_plan(plan).plan.cameras]
    with client, waiting("adding cameras"):
        known = {each.name for each in client.call(op.GetCameras())}
        for one in found:
            change = op.ChangeCamera(one["name"], dict.fromkeys(CameraPlan.model_fields) | one)
            _show(client.call(change if one["name"] in known else op.AddCamera(one)), as_json)


def _camera(camera: CameraStatus) -> Iterator[str]:
    health = camera.health
    age = "" if health.age_s is None else f"last frame {health.age_s:.1f} s ago  "
    counts = f"{health.num_answers} answers  {health.num_reconnects} reconnects  {camera.num_events} events"
    yield f"{camera.name}  {camera.state}  {camera.source}  {health.fps:.1f} frames/s  {age}{counts}"
    yield from [f"  last error: {health.error}"] if health.error else []
    for event in camera.events:
        yield f"  {event.time:%Y-%m-%d %H:%M:%S}  {event.event}  {event.label}  {event.problem or event.text or ''}"


_LINES: dict[type, Any] = {
    AdapterStatus: _adapter,
    TrainingStatus: _training,
    LearningStatus: _learning,
    EngineStats: _stats,
    ClusterStatus: _cluster,
    AdapterPlace: _place,
    CameraStatus: _camera,
}
"""Each status as text."""


def _add(
    group: click.Group,
    name: str,
    operation: type[op.Operation],
    example: str,
    *,
    fixed: Mapping[str, Any] = {},
    done: str = "",
    none: str = "",
    text: str | None = None,
    **options: str,
) -> None:
    """Add a command that calls an operation, until it returns no False.

    Args:
        example: Arguments, for the help.
        fixed: Fields of the operation that are not arguments.
        done: What to print if the operation returns nothing.
        none: What to print if it returns an empty tuple.
        text: The help, if it is not the operation's docstring.
        options: Help of the optional fields that the command has.
    """

    def run(client: Client, as_json: bool, upload: bool = False, **fields: Any) -> None:
        for field in _PATHS:
            if fields.get(field) is not None:
                fields[field] = os.path.abspath(os.path.expanduser(fields[field]))
        with client, waiting(" ".join([name, *(str(value) for value in fields.values() if value)])):
            asked = operation(**fields, **fixed)
            while (found := client.load_adapter(**fields, upload=True) if upload else client.call(asked)) is False:
                pass
        if found is None or found is True:
            print_json({**fields, "done": done}) if as_json else click.echo(f"{fields['name']}  {done}")
        else:
            _show(found, as_json, none)

    params: list[click.Parameter] = []
    if "upload" in options:
        params.append(click.Option(["--upload"], is_flag=True, help=options["upload"]))
    for field in msgspec.structs.fields(operation):
        if field.name in options:
            params.append(click.Option([f"--{field.name}"], is_flag=field.type is bool, help=options[field.name]))
        elif field.required and field.name not in fixed:
            params.append(click.Argument([field.name]))
    text = text or inspect.cleandoc(operation.__doc__ or "")
    command(group, name, params=params, help=f"{text}\n\n\b\n    vlora {group.name} {name} {example}")(run)


_add(adapters, "list", op.GetAdapters, "--json", none="no adapters")
_add(adapters, "load", op.LoadAdapter, "signs /srv/adapters/signs", upload="Send the files of PATH of this machine.")
_add(
    adapters,
    "unload",
    op.UnloadAdapter,
    "signs --drain",
    done="unloaded",
    drain="Let its running requests finish instead of cancelling them.",
)
_add(adapters, "pin", op.PinAdapter, "signs", fixed={"pinned": True})
_add(
    adapters,
    "unpin",
    op.PinAdapter,
    "signs",
    fixed={"pinned": False},
    text="Allow the adapter NAME to be evicted from the device again.",
)
_add(train, "submit", op.Train, "plan.yaml")
_add(train, "status", op.ListTrainings, "--json", none="no trainings")
_add(train, "cancel", op.CancelTraining, "signs")
_add(
    train,
    "promote",
    op.Promote,
    "signs --path out/adapters/signs",
    version=f"{_VERSION}the last one not promoted.",
    path="A folder in the file system of the server's machine, instead.",
    force="Serve it at once, without evaluation.",
)
_add(train, "rollback", op.RollBack, "signs", version=f"{_VERSION}the one before.")
_add(cluster, "drain", op.DrainReplica, "replica-0", done="drained")
_add(cluster, "resume", op.ResumeReplica, "replica-0", done="resumed")
_add(cameras, "list", op.GetCameras, "--json", none="no cameras")
for _name, _paused, _text in (
    ("pause", True, "Stop reading a camera."),
    ("resume", None, "Continue to read a camera."),
):
    _add(cameras, _name, op.ChangeCamera, "north", fixed={"changes": {"paused": _paused}}, text=_text)
_add(cameras, "remove", op.RemoveCamera, "north", done="removed")

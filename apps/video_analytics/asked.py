"""Task heads of one or several adapters, and questions in words, that are asked about each clip."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from apps.video_analytics.sampling import ClipShape
from apps.video_analytics.sources import unique_names
from vlora.client import Client, TextQuestion
from vlora.errors import BadRequest, UnknownAdapter, UnknownHead
from vlora.types import AdapterStatus, HeadSummary, composed_of, is_composed

_LONGEST_NAME = 40


class Asked(NamedTuple):
    """A head of an adapter, or a question in words (`head` is then empty).

    name: short, unique among those asked together; a part of file names. max_tokens: of the text. tracked: the head
    is a detection, and its objects are followed on every frame.
    """

    name: str
    adapter: str | None
    head: str = ""
    question: str = ""
    max_tokens: int = 64
    tracked: bool = False


class Group(NamedTuple):
    """Heads and questions that share one stream. shape: of their clips."""

    shape: ClipShape
    asked: tuple[Asked, ...]

    @property
    def heads(self) -> list[tuple[str, str]]:
        return [(asked.adapter, asked.head) for asked in self.asked if asked.adapter is not None and asked.head]

    @property
    def questions(self) -> list[TextQuestion]:
        return [TextQuestion(asked.question, asked.adapter, asked.max_tokens) for asked in self.asked if not asked.head]


def find_groups(
    client: Client,
    adapters: Sequence[str],
    heads: Sequence[str],
    questions: Sequence[str] = (),
    max_tokens: int = 64,
    fps: float | None = None,
) -> list[Group]:
    """Group what is asked by the number of frames of its clips. Questions are about one frame.

    Args:
        adapters: adapters or domains that the heads and questions belong to. Every question is asked of each; without
            adapters, of the base model.
        heads: HEAD, which exactly one of the adapters has, or ADAPTER/HEAD.
        max_tokens: of each text.
        fps: frames per second of the clips; None makes one clip per second.

    Raises:
        UnknownAdapter, UnknownHead: the server does not have them.
        BadRequest: nothing is asked, something is asked twice, or a head belongs to several of the adapters.
    """
    statuses = by_name(client.adapters())
    found = [find_head(statuses, adapters, head) for head in heads]
    for part in (part.adapter for adapter in adapters for part in composed_of(adapter)):
        if part not in statuses:
            raise unknown(part, statuses)
    if not found and not questions:
        raise BadRequest("nothing is asked; give at least one --head or --question")
    several = len({adapter for adapter, _ in found} | set(adapters)) > 1
    asked = [Asked(name_of(adapter, head, several), adapter, head.name) for adapter, head in found]
    frames = [head.num_frames for _, head in found]
    for question in questions:
        for owner in adapters or (None,):
            name = f"{owner}-{question}" if several and owner else question
            asked.append(Asked(name, owner, question=question, max_tokens=max_tokens))
            frames.append(1)
    return grouped(asked, [ClipShape(number, fps) for number in frames])


def by_name(statuses: Iterable[AdapterStatus]) -> dict[str, AdapterStatus]:
    """The adapters by their own names, and by those of their domains."""
    found = tuple(statuses)
    domains = {domain.name: status for status in found for domain in status.domains}
    return domains | {status.name: status for status in found}


def heads_of(status: AdapterStatus, name: str) -> list[str]:
    """The head of a domain of this name, if it is not the adapter's own name, or all of the adapter's."""
    only = [domain.head for domain in status.domains if domain.name == name != status.name]
    return [head.name for head in status.heads if not only or head.name in only]


def name_of(adapter: str, head: HeadSummary, several: bool) -> str:
    """The short name of a head. several: whether other adapters are asked, too."""
    return f"{adapter}-{head.name}" if several and adapter != head.name else head.name


def grouped(asked: Sequence[Asked], shapes: Sequence[ClipShape], reserved: Sequence[str] = ()) -> list[Group]:
    """Group what is asked by the shape of its clips, with names that can be parts of file names.

    Args:
        shapes: of the clips, for each of `asked`.
        reserved: names that are not given.

    Raises:
        BadRequest: something is asked twice.
    """
    for (owner, head, question), count in Counter(each[1:4] for each in asked).items():
        if count > 1:
            what = f"head {head!r} of adapter {owner!r}" if head else f"question {question!r}"
            raise BadRequest(f"{what} is given more than once; give it once")
    short = [re.sub(r"[^\w-]+", "-", each.name)[:_LONGEST_NAME].strip("-") or "question" for each in asked]
    names = unique_names([*reserved, *short])[len(reserved) :]
    named = [each._replace(name=name) for each, name in zip(asked, names, strict=True)]
    return [
        Group(shape, tuple(each for each, own in zip(named, shapes, strict=True) if own == shape))
        for shape in dict.fromkeys(shapes)
    ]


def find_head(statuses: dict[str, AdapterStatus], adapters: Sequence[str], head: str) -> tuple[str, HeadSummary]:
    """The adapter or domain to ask for a head, and the head's description. A name with a slash may be a head's own."""
    owners = [name for name in adapters if head in _heads(statuses, name)]
    if len(owners) > 1:
        ways = " or ".join(f"--head {owner}/{head}" for owner in owners)
        raise BadRequest(f"several of the adapters have a head {head!r}; write {ways}")
    if owners:
        return owners[0], _heads(statuses, owners[0])[head]
    adapter, slash, name = head.rpartition("/")
    if not slash:
        if not adapters:
            raise BadRequest(f"--head is {head!r}; also give its --adapter, or write ADAPTER/HEAD")
        adapter = adapters[0]
    if is_composed(adapter):
        raise UnknownAdapter(f"adapter {adapter!r} is a composition; a task head belongs to one adapter: name that one")
    if adapter not in statuses:
        raise unknown(adapter, statuses)
    if name not in (own := _heads(statuses, adapter)):
        having = [other for other in statuses if other == statuses[other].name and name in _heads(statuses, other)]
        hint = f"; head {name!r} belongs to adapter {' and '.join(map(repr, having))}" if having else ""
        raise UnknownHead(f"adapter {adapter!r} has no head {name!r}; its heads: {', '.join(own) or 'none'}{hint}")
    return adapter, own[name]


def _heads(statuses: dict[str, AdapterStatus], adapter: str) -> dict[str, HeadSummary]:
    status = statuses.get(adapter)
    own = [] if status is None else heads_of(status, adapter)
    return {head.name: head for head in status.heads if head.name in own} if status is not None else {}


def unknown(adapter: str, statuses: dict[str, AdapterStatus]) -> UnknownAdapter:
    own = [name for name, status in statuses.items() if status.name == name]
    return UnknownAdapter(f"no adapter named {adapter!r}; registered: {', '.join(own) or 'none'}")

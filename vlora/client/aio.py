"""The asyncio client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Self

from vlora import operations as op
from vlora.client.calling import Caller, OnLoop
from vlora.client.frame_stream import AsyncFrameStream
from vlora.client.inputs import (
    Adapter,
    Documents,
    Image,
    Visual,
    read_adapter,
    read_documents,
    read_images,
    read_visual,
    stream_heads,
    stream_questions,
    text_request,
)
from vlora.client.requests import AskHead, AskHeads, Detokenize, Embed, GetScores, OpenFrames, Tokenize
from vlora.client.values import Answer, HeadOutcome, HeadResult, StreamOptions, TextQuestion
from vlora.types import AdapterStatus, EngineStats, TrainingStatus
from vlora.types.domain import Way
from vlora.types.learning import Correction, LearningStatus
from vlora.types.replicas import AdapterPlace, ClusterStatus
from vlora.types.request import Pooling


class AsyncClient(Caller):
    """As `Client`. Cancelling a task that awaits an answer cancels the request on the server."""

    waiting = OnLoop()

    async def generate(
        self,
        question: str,
        images: Sequence[Visual] = (),
        adapter: Adapter | None = None,
        *,
        max_latency_s: float | None = None,
        max_ttft_s: float | None = None,
        priority: int = 0,
        answer: Way | None = None,
        **sampling: Any,
    ) -> Answer:
        """Answer a question, optionally about images and videos (`Video`, `VideoFile`), in words or by a domain's head.

        Args:
            adapter: The name of an adapter or of a domain. Several adapters are composed: "a+b", or
                {"a": 0.7, "b": 0.3} with weights.
            sampling: fields of `vlora.types.SamplingParams`.
            max_latency_s: bound on the whole answer; a later answer raises DeadlineMissed.
            max_ttft_s: bound on the first token. If the server predicts that it cannot meet a bound, it rejects the
                request immediately (DeadlineUnreachable).
            priority: from -10 to 10; waiting requests of higher priority are scheduled first.
            answer: "head" or "words"; None: the way that was more accurate on the domain's validation data, if the
                question is the domain's (or empty) and no option of sampling is given; `Answer.answered_by` says which.
        """
        return await self._call(
            text_request(question, images, adapter, max_latency_s, max_ttft_s, priority, answer, **sampling)
        )

    async def stream(
        self,
        question: str,
        images: Sequence[Visual] = (),
        adapter: Adapter | None = None,
        *,
        max_latency_s: float | None = None,
        max_ttft_s: float | None = None,
        priority: int = 0,
        answer: Way | None = None,
        **sampling: Any,
    ) -> AsyncIterator[str | Answer]:
        """As `generate`, but yields pieces of text as they arrive; `AsyncClient` yields the complete Answer last.

        Leaving the stream early cancels the request.
        """
        parts = await self._begin(
            text_request(question, images, adapter, max_latency_s, max_ttft_s, priority, answer, **sampling)
        )
        try:
            while not parts.ended:
                yield await parts.next()
        finally:
            parts.close()

    async def ask_head(
        self,
        images: Sequence[Image],
        adapter: str,
        head: str | None = None,
        *,
        max_latency_s: float | None = None,
        priority: int = 0,
    ) -> HeadResult:
        """Query a task head, which answers in one pass and has a fixed question; images: as many as it has frames.

        adapter: The name of an adapter or a domain. head: without it, the domain's.
        """
        levels: dict[str, Any] = {"max_latency_s": max_latency_s, "priority": priority}
        return await self._call(AskHead(images=read_images(images), adapter=adapter, head=head, **levels))

    async def ask_heads(
        self,
        images: Sequence[Image],
        heads: Sequence[tuple[str, str | None]],
        *,
        max_latency_s: float | None = None,
        priority: int = 0,
    ) -> tuple[HeadOutcome, ...]:
        """Query several task heads about the same images in one request.

        The images are sent, read and encoded once for all adapters that do not change the vision side. Activated
        adapters also share the computation of the prompt before their invocation.

        Args:
            images: As many as each of the heads reads.
            heads: Pairs of an adapter or a domain and a head; None for the domain's.
            max_latency_s: Bound on each answer, as in `generate`.
            priority: As in `generate`.

        Returns:
            For each pair, in order, its answer or its error: a head that fails does not affect the others.
        """
        pairs = tuple((adapter, head) for adapter, head in heads)
        levels: dict[str, Any] = {"max_latency_s": max_latency_s, "priority": priority}
        return await self._call(AskHeads(images=read_images(images), heads=pairs, **levels))

    async def embed(
        self, documents: Documents, adapter: str | None = None, *, pooling: Pooling = "last"
    ) -> tuple[tuple[float, ...], ...]:
        """The embedding of each document: the language model's last hidden state, pooled, with length 1.

        Args:
            documents: Texts, which are read without the chat template, and lists of pictures, as a user's turn.
            adapter: The name of an adapter or of a domain, or a composition such as "a+b".
            pooling: "last": the state of the last token; "mean": the mean of all tokens' states.
        """
        return await self._call(Embed(documents=read_documents(documents), adapter=adapter, pooling=pooling))

    async def score(self, question: str, documents: Documents, adapter: str | None = None) -> tuple[float, ...]:
        """The probability that "yes" is the answer to a question about each document, a text or a list of pictures."""
        return await self._call(GetScores(question=question, documents=read_documents(documents), adapter=adapter))

    async def tokenize(self, text: str, images: Sequence[Visual] = (), *, chat: bool = False) -> tuple[int, ...]:
        """The token ids of a text; with `chat` or images, those of a question as `generate` sends it to the model."""
        return await self._call(Tokenize(text=text, images=tuple(map(read_visual, images)), chat=chat))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids, with special tokens by name."""
        return await self._call(Detokenize(tuple(tokens)))

    async def open_stream(
        self,
        *,
        adapter: str | None = None,
        head: str | None = None,
        heads: Sequence[tuple[str, str]] = (),
        questions: Sequence[TextQuestion] = (),
        max_latency_s: float | None = None,
        fps: float | None = None,
        drop: Literal["newest", "none"] = "newest",
        priority: int = 0,
        name: str = "",
    ) -> AsyncFrameStream:
        """Open a stream of frames, each of which one or several heads and questions answer; results are in order.

        The work that they share is done once, as in `ask_heads`.

        Args:
            adapter, head: the only head, or the first one.
            heads: more pairs of an adapter and one of its heads; all read the same number of images.
            questions: questions that an adapter or the base model answers in words.
            max_latency_s: bound on each answer, from the frame's arrival.
            fps: maximum number of frames started per second.
            drop: policy when frames arrive faster than they are answered: "newest" replaces a waiting frame by a newer
                one (the replaced frame's result reports it), "none" makes sending wait.
            priority: priority of the stream's requests among all waiting requests.
            name: of the camera, which the console shows beside what is asked.

        Raises:
            UnknownAdapter, UnknownHead: the server does not have them.
            BadRequest: there is no head and no question, one is given twice, or the heads read different numbers of
                images.
            OverCapacity: the server has too many streams.
        """
        options = StreamOptions(
            heads=stream_heads(adapter, head, heads),
            questions=stream_questions(questions),
            max_latency_s=max_latency_s,
            fps=fps,
            drop=drop,
            priority=priority,
            name=name,
        )
        return AsyncFrameStream(await self._call(OpenFrames(options)), self._call, self.waiting, self._timeout_s)

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        """Every adapter of the server, with its heads."""
        return await self._call(op.GetAdapters())

    async def load_adapter(self, name: str, path: str | os.PathLike[str], *, upload: bool = False) -> AdapterStatus:
        """Register an adapter folder of the server's file system under a name. Raises BadAdapter with the cause.

        upload: Send the files of the folder from this machine.
        """
        load = op.UploadAdapter(name, read_adapter(path)) if upload else op.LoadAdapter(name, os.fspath(path))
        return await self._call(load)

    async def unload_adapter(self, name: str, *, drain: bool = False) -> None:
        """Unregister an adapter: new requests for it are rejected immediately. Raises UnknownAdapter.

        Its running requests are cancelled; with `drain` they finish, and its memory is freed after the last of them.
        """
        return await self._call(op.UnloadAdapter(name, drain))

    async def pin_adapter(self, name: str, pinned: bool = True) -> AdapterStatus:
        """Keep an adapter on the server's device, or allow its eviction. Raises UnknownAdapter, OverCapacity."""
        return await self._call(op.PinAdapter(name, pinned))

    async def train(self, plan: str | os.PathLike[str]) -> tuple[TrainingStatus, ...]:
        """Begin or continue the trainings of a plan file of the server's file system.

        Raises:
            BadPlan: The plan or its data cannot be used.
            BadRequest: The engine cannot train, the model lacks a target, or the name of a training is in use.
        """
        return await self._call(op.Train(os.fspath(plan)))

    async def trainings(self) -> tuple[TrainingStatus, ...]:
        """Every training since the server's engine started."""
        return await self._call(op.ListTrainings())

    async def cancel_training(self, name: str) -> TrainingStatus:
        """End a training; `train` with its plan continues it. Raises BadRequest if it is not running."""
        return await self._call(op.CancelTraining(name))

    async def correct(self, answer: Answer | str, label: str) -> Correction:
        """Send the right answer of a request, for the training of the adapter that answered.

        Returns once the server has it on disk. A later correction of the same answer replaces it.

        Args:
            answer: Of this caller, or its `request_id`; an admin token corrects all.
            label: The right answer.

        Raises:
            BadRequest: The answer is not kept (any longer), or the label is empty.
        """
        return await self._call(op.Correct(answer if isinstance(answer, str) else answer.request_id, label))

    async def learning(self) -> tuple[LearningStatus, ...]:
        """The adapters that learn, with their versions."""
        return await self._call(op.GetLearning())

    async def promote(
        self,
        name: str,
        *,
        version: str | None = None,
        path: str | os.PathLike[str] | None = None,
        force: bool = False,
    ) -> LearningStatus:
        """Evaluate a version of a learning adapter in the background, and serve it if it is better.

        Args:
            name: Of the adapter.
            version: One on disk; its first digits suffice. None: the last one that was not promoted.
            path: A folder of the server's file system, instead.
            force: Serve it at once, without evaluation.

        Raises:
            BadRequest: The adapter does not learn, or there is no such version.
            BadAdapter: The folder cannot be served.
        """
        return await self._call(op.Promote(name, version, None if path is None else os.fspath(path), force))

    async def roll_back(self, name: str, version: str | None = None) -> LearningStatus:
        """Serve an earlier version of a learning adapter. version: its first digits suffice; None: the one before."""
        return await self._call(op.RollBack(name, version))

    async def call(self, operation: op.Operation) -> Any:
        """The result of any operation of `vlora.operations`."""
        return await self._call(operation)

    async def stats(self) -> EngineStats:
        """Counters of the engine since its start."""
        return await self._call(op.GetStats())

    async def cluster(self) -> ClusterStatus:
        """The server's replicas. Raises UnknownReplica if it has one engine."""
        return await self._call(op.GetCluster())

    async def cluster_adapters(self) -> tuple[AdapterPlace, ...]:
        """Where each adapter is, replica by replica, and why one cannot be used. Raises BadRequest for one engine."""
        return await self._call(op.GetAdapterPlaces())

    async def drain_replica(self, name: str, *, wait_s: float = 5.0) -> bool:
        """Move a replica's requests to others, and send it no further ones until `resume_replica`.

        While no replica has room, a few of them wait at a time, with precedence over others. Raises UnknownReplica if
        there is no such replica, and BadRequest if no other one serves.

        Args:
            wait_s: How long to wait, at most 30 seconds.

        Returns:
            Whether it has no requests left; it is drained in both cases.
        """
        return await self._call(op.DrainReplica(name, min(wait_s, op.MAX_WAIT_S)))

    async def resume_replica(self, name: str) -> None:
        """Send requests to a drained replica again. Raises UnknownReplica if there is none."""
        return await self._call(op.ResumeReplica(name))

    async def scale(self, number: int | Literal["auto"], *, wait_s: float = 5.0) -> bool:
        """Have another number of replicas: start further ones, or drain the last ones and then end them.

        Raises BadRequest for a number over the server's limit.

        Args:
            number: Their number, which holds until another call; "auto": the load decides from now on.
            wait_s: How long to wait, at most 30 seconds.

        Returns:
            Whether it is done. If not, starts go on, but what drains is ended by another call only.
        """
        return await self._call(op.Scale(number, min(wait_s, op.MAX_WAIT_S)))

    async def close(self) -> None:
        """As `Client.close`."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

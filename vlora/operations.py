"""The verbs of an operator: one struct for each call. `vlora.client.requests` has the requests for answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

import msgspec

from vlora.types import AdapterStatus, EngineStats, TrainingStatus
from vlora.types.camera import CameraStatus
from vlora.types.learning import Correction, LearningStatus
from vlora.types.replicas import AdapterPlace, ClusterStatus

MAX_WAIT_S = 30.0

WaitS = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]
"""Seconds until the reply to a change that is not done yet; the change goes on."""


class Operation(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """result: the type of what the call returns. admin: whether a caller needs an admin token."""

    result: ClassVar[Any] = None
    admin: ClassVar[bool] = False


class GetStats(Operation, frozen=True):
    result = EngineStats


class GetAdapters(Operation, frozen=True):
    """The adapters: rank, size, heads, and whether each is on the device, pinned or mergeable."""

    result = tuple[AdapterStatus, ...]


class LoadAdapter(Operation, frozen=True):
    """Load an adapter folder of the server's file system as NAME. An existing name keeps its content until then."""

    result = AdapterStatus
    admin = True
    name: str
    path: str


class UploadAdapter(Operation, frozen=True):
    """Load an adapter as NAME from the files of its folder, by name."""

    result = AdapterStatus
    admin = True
    name: str
    files: dict[str, bytes]


class UnloadAdapter(Operation, frozen=True):
    """Remove an adapter and cancel its requests, or with `drain` let them finish. Its files stay."""

    admin = True
    name: str
    drain: bool = False


class PinAdapter(Operation, frozen=True):
    """Load an adapter onto the device and keep it there, or allow its eviction."""

    result = AdapterStatus
    admin = True
    name: str
    pinned: bool


class Train(Operation, frozen=True):
    """Begin or continue the trainings of a plan file on the server's file system, all or none.

    Trainings that were cancelled or have failed continue from their checkpoints.
    """

    result = tuple[TrainingStatus, ...]
    admin = True
    plan: str


class ListTrainings(Operation, frozen=True):
    """The trainings: state, steps, losses, and why one does not run at present."""

    result = tuple[TrainingStatus, ...]


class CancelTraining(Operation, frozen=True):
    """End a training; its plan continues it."""

    result = TrainingStatus
    admin = True
    name: str


class Correct(Operation, frozen=True):
    """Keep the right answer of a request."""

    result = Correction
    request_id: str
    label: str


class GetLearning(Operation, frozen=True):
    """The adapters that learn."""

    result = tuple[LearningStatus, ...]


class Promote(Operation, frozen=True):
    """Evaluate a version on disk (its first digits suffice) or a folder, and serve it if it is better, or by force."""

    result = LearningStatus
    admin = True
    name: str
    version: str | None = None
    path: str | None = None
    force: bool = False


class RollBack(Operation, frozen=True):
    """Serve an earlier version. version: on disk; its first digits suffice. None: the one before."""

    result = LearningStatus
    admin = True
    name: str
    version: str | None = None


class GetCluster(Operation, frozen=True):
    """The replicas."""

    result = ClusterStatus


class GetAdapterPlaces(Operation, frozen=True):
    """Every adapter on every replica."""

    result = tuple[AdapterPlace, ...]


class DrainReplica(Operation, frozen=True):
    """Move a replica's requests to others, and send it no further ones until it is resumed, also after a restart.

    Requests that no other replica could take end where they are. Returns whether it has none left.
    """

    result = bool
    admin = True
    name: str
    wait_s: WaitS = 5.0


class ResumeReplica(Operation, frozen=True):
    """Send requests to a drained replica again."""

    admin = True
    name: str


class Scale(Operation, frozen=True):
    """Have another number of replicas, or let the load decide. Returns whether it is done."""

    result = bool
    admin = True
    replicas: int | Literal["auto"]
    wait_s: WaitS = 5.0


class GetCameras(Operation, frozen=True):
    """The cameras that the server reads, with their health and last events."""

    result = tuple[CameraStatus, ...]


class GetFrame(Operation, frozen=True):
    """The next frame that a camera sends, as JPEG."""

    result = bytes
    admin = True
    name: str
    wait_s: WaitS = 10.0


class AddCamera(Operation, frozen=True):
    """Read a camera from now on, also after a restart. camera: as in the plan of `vlora stream`; or `paused`, too."""

    result = CameraStatus
    admin = True
    camera: dict[str, Any]


class ChangeCamera(Operation, frozen=True):
    """Replace fields of a camera's description; null removes one."""

    result = CameraStatus
    admin = True
    name: str
    changes: dict[str, Any]


class RemoveCamera(Operation, frozen=True):
    """Stop reading a camera, and forget it."""

    admin = True
    name: str


OperatorCall: Any = Union[*Operation.__subclasses__()]
"""Those above: no other module has been able to define any yet."""

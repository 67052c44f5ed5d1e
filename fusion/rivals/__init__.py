"""Small single-task models that an adapter replaces: trained on a domain's training part within minutes on a CPU, and
exported to ONNX."""

from fusion.rivals.models import RIVALS, Rival, SmallModel

__all__ = ["RIVALS", "Rival", "SmallModel"]

"""Import this first in a child process that needs no model: `vlora.engine` then loads no torch."""

from __future__ import annotations

import sys
import types
from pathlib import Path

package = types.ModuleType("vlora.engine")
package.__path__ = [str(Path(__file__).parents[2] / "vlora" / "engine")]
sys.modules["vlora.engine"] = package

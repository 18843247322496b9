"""The conformance suite: what a training backend must do, for its author's tests and for `enginehouse certify`.

Names are imported when first used: pytest is needed by `TrainEngineSuite` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.lazy import exports

if TYPE_CHECKING:
    from enginehouse.testing.certificate import Certificate, Result
    from enginehouse.testing.running import certify
    from enginehouse.testing.suite import TrainEngineSuite

__all__ = ["Certificate", "Result", "TrainEngineSuite", "certify"]

__getattr__ = exports(
    __name__,
    {"certificate": ["Certificate", "Result"], "running": ["certify"], "suite": ["TrainEngineSuite"]},
)

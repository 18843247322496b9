"""Keeps the metrics that vLLM gives a stat logger at each step."""

from __future__ import annotations

from typing import Any

from enginehouse.engines.progress import note_progress


class Statistics:
    """Metrics of vLLM's last step; `running` is the number of completions in its batch."""

    def __init__(self) -> None:
        self.running = 0
        self._kv_cache_usage = 0.0
        self._queried = 0
        self._hit = 0

    def figures(self) -> dict[str, float]:
        """Return the used fraction of the KV cache, and the hit rate of the prefix cache since the launch, 0 to 1."""
        return {
            "kv_cache_usage": self._kv_cache_usage,
            "prefix_cache_hit_rate": self._hit / self._queried if self._queried else 0.0,
        }

    def take(self, scheduler: Any) -> None:
        """Store the metrics in vLLM's `SchedulerStats` of a step, which may have computed nothing."""
        self.running = scheduler.num_running_reqs
        self._kv_cache_usage = scheduler.kv_cache_usage
        self._queried += scheduler.prefix_cache_stats.queries
        self._hit += scheduler.prefix_cache_stats.hits

    def make_logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """Return a stat logger for vLLM that gives its metrics to this object."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        statistics = self

        class Logger(StatLoggerBase):
            def __init__(self) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                if iteration_stats is not None:  # something was computed: an engine that hangs has steps too
                    note_progress()
                if scheduler_stats is not None:
                    statistics.take(scheduler_stats)

            def log_engine_initialized(self) -> None:
                pass

        return Logger()

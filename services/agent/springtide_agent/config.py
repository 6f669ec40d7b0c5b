"""The agent's time constants. All are divided by the pod's `time_scale`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of one agent; times in seconds. Read from `SPRINGTIDE_AGENT_<FIELD>` variables."""

    quiet_seconds: float = 2.0
    """A file set that has not changed for so long counts as saved (`saved: quiet`). Too short for
    programs that pause while they save: the torn set is noticed only if it changes again."""
    quiet_limit_seconds: float = 600.0
    """Longest wait for a quiet file set; then this checkpoint is given up."""
    mtbf_seconds: float = 86_400.0
    """Mean time between failures that lose work, for Young's interval."""
    least_interval_seconds: float = 300.0
    most_interval_seconds: float = 43_200.0
    retry_checkpoint_seconds: float = 60.0
    """Pause after a checkpoint that failed; grows with each failure up to the usual interval."""
    upload_limit_seconds: float = 3_600.0
    """Longest upload of one checkpoint; then it is given up and the one before stays newest."""
    frozen_patience_seconds: float = 30.0
    """How long a frozen program waits for a store that fails; then it goes on where it is."""
    final_save_limit_seconds: float = 120.0
    """Longest upload of the checkpoint after a request to end; whoever asked has a limit too."""
    logs_limit_seconds: float = 60.0
    """Longest upload of logs where nothing depends on them."""
    store_limit_seconds: float = 1_800.0
    """How long the store may be away while records, checkpoint or outputs wait for it."""
    pause_seconds: float = 1.0
    """First pause after a store fault; doubles up to `most_pause_seconds`."""
    most_pause_seconds: float = 60.0
    keep_manifests: int = 2
    """Newest checkpoints kept; at least 2, so that a damaged one has one before it."""

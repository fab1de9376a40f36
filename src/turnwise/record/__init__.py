"""What a run leaves behind, and reading it back: `read(run)` and `RecordedTrajectories(run)[n]` give typed trajectories."""

from turnwise.record.reader import RecordedTrajectories, read

__all__ = ["RecordedTrajectories", "read"]

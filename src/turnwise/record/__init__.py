"""What a run leaves behind, and reading it back.

`read(run)` and `RecordedTrajectories(run)[n]` give typed trajectories, `to_pandas(run)` a data frame.
"""

from turnwise.record.reader import RecordedTrajectories, read
from turnwise.record.reader import trajectories_frame as to_pandas

__all__ = ["RecordedTrajectories", "read", "to_pandas"]

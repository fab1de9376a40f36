"""What a run leaves behind, and reading it back.

`read(run)` and `RecordedTrajectories(run)[n]` give typed trajectories, `to_pandas(run)` a data frame.
"""

from turnwise.record.frames import trajectories_frame as to_pandas
from turnwise.record.reader import RecordedTrajectories, read

__all__ = ["RecordedTrajectories", "read", "to_pandas"]

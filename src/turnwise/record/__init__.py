"""What a run leaves behind, and reading it back.

`read(run)` and `RecordedTrajectories(run)[n]` give typed trajectories, `episodes(read(run))` those of rows with their agents',
`to_pandas(run)` a data frame.
"""

from turnwise.record.reader import RecordedTrajectories, episodes, read
from turnwise.record.reader import trajectories_frame as to_pandas

__all__ = ["RecordedTrajectories", "episodes", "read", "to_pandas"]

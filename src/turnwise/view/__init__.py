"""The viewer: a local web page that shows runs, their metrics and their conversations token by token.

`index` keeps one small row for each conversation, `runs` reads what a run has written, and `server` serves the page and its
data to a browser on this machine, or writes the same page into one file. All of them read the record; none of them writes to
it. Labels and notes are in a file beside it.
"""

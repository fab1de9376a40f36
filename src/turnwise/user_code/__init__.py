"""How code written by users is found, called, limited in time and run in threads.

`errors.boundary` makes an exception of user code data; `calls.py` gives each call a deadline that counts only its own
conversation's time; sync code runs in threads (`threads.py`), blocking `async` methods in a loop of their conversation on request
(`thread_loops.py`), what sets a signal handler in the main thread. A run ends only if all conversations of a step fail.
"""

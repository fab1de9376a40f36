"""A format of tool calls learned from a chat template, for templates that no named format can parse.

The template renders probe calls. The text around the names and the arguments gives the marks of the format. Arguments may be

- a JSON object with the name inside it (`json_object`),
- a JSON object after the name (`name_first`),
- one by one between marks (`marked`), or
- written as in Python (`python`).

A format is accepted only if it parses the probe calls back. It needs an opening mark, because without an
opening mark a call could not be distinguished from content. Exception: the format of GLM-4, in which the first line of the turn
is the name of an offered tool, and a JSON object follows.
"""

from turnwise.chat.tool_calls.learned.learn import learn
from turnwise.chat.tool_calls.learned.probe import PROBE_TOOLS, ProbeWriter, Write

__all__ = ["PROBE_TOOLS", "ProbeWriter", "Write", "learn"]

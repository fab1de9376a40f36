"""Messages to tokens and back, from the model's own chat template. Knows no engine and no environment.

What a template does is found once, by rendering probe messages (`template_profile.py`, `probes.py`), never by the name of a
family. After a turn, only the *bridge* is encoded (`renderer.py`). `sanity_check.py` compares with a rendering in one pass, and
decides with `thinking=branch` whether a segment begins. An agent that calls the model with token ids writes its prompts itself
(`Reply.prompt_ids`); `environments/agents/token_agent.py` compares what it returns with what was sampled.
"""

"""vLLM as the engine: its HTTP servers (`api`, `launch`), its engine in this process (`in_process`), and code in its workers."""

"""SGLang as the engine: servers over HTTP (`api`), how they are started (`launch`), and checks of their weights (`checksums`)."""

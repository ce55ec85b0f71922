"""One module per host: `build(stage)` returns its app, `make()` is the factory for servers."""

"""Targets of the load: splitserve schedulers over gRPC, or servers of OpenAI's API over HTTP."""

"""Who is asked: our schedulers over gRPC, or whatever speaks OpenAI's API."""

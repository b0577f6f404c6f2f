"""What a model wrote, told apart: reasoning, content, tool calls. Text only, no web."""

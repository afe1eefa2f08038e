"""Tools of a chat: which the model may call, and its text taken apart into content, reasoning and calls."""

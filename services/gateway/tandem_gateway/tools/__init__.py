"""Tools of a chat: choosing and enforcing them, and parsing content, reasoning and calls from text."""

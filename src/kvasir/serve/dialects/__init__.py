"""The protocols that clients speak. A dialect imports the conversation, never another dialect."""

"""Who may do what: keys, scopes and limits."""

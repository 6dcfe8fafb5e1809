"""Tell a router elsewhere which blocks can be hit: `journal`."""

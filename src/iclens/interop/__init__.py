"""Models out to other tools, and models of other tools in."""

"""Named like a module of the standard library, which torch imports; every run of these tests has it beside it."""

raise RuntimeError("a file in the current directory stands in for the standard library's")

"""The page for browsers: a chat over the public API, and a view of the running batch.

`page` serves the files of this folder. They are ES modules and CSS that run as they are written;
`vendor/` has libraries of other authors (VENDORED.md). docs/ui.md describes the page.
"""

"""Compiled artifacts that outlive the process.

A server compiles into a working folder that nobody else uses, and what is complete is kept as one file, a bundle, in
the cache directory. The next server with the same key starts with what the bundle holds. So no two processes write the
same file, a bundle is there as a whole or not at all, and what is in it is checked before anything of it is loaded.
"""

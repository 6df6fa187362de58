"""Arms of one model side by side: what is started, asked, written down, and said of it.

Nothing here imports the host: servers are processes, and are spoken to over HTTP.
"""

"""The console: a page that shows a running mesh, and does what the operators' commands do.

    settings   what the console can be told
    service    composition root: opens the port, stops
    app        HTTP: the page's files, the stream of events, lookups, and what pages may do
    actions    what pages do to the mesh, by the functions of the operators' commands
    access     who may read and who may act: the token, the headers of every answer
    live       one reader for any number of pages; nothing is read while nobody looks
    reader     one reading of the mesh, bounded whatever the mesh holds
    snapshot   what a reading found
    view       pure: from readings to what pages show
    history    pure: what charts show, over minutes and an hour
    events     pure: what happened between two readings
    stories    pure: what became of single sequences
    static     the page, built from `web` by `make console`; `seal` says that both belong together

It reads Redis as the operators' commands do, and writes into it only when somebody acts.
"""

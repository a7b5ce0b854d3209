"""The release matrix: the tests of this repository on every SGLang release that the plugin supports.

``make matrix`` runs it and writes ``docs/releases.md``. Run as ``cd tests && ../.venv/bin/python -m matrix``;
``--help`` lists the options. It builds one environment a release (``environments``), runs the scenarios in each
(``scenarios``) and keeps what came out on the page (``page``).

A test tells the page more than its outcome by pytest's ``record_property(name, value)``:

* ``refused``: the reason why the plugin's gate, or SGLang, refuses this on this release. The test counts as refused,
  not as passed or failed. A skip with a reason that begins with ``refused: `` says the same.
* any other name is a figure. Numbers of several tests are added, or the largest is taken where the name begins with
  ``greatest``; other values are listed.
"""

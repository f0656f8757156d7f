# SPDX-License-Identifier: Apache-2.0
"""`python -m winnow report`: measurements as one HTML page that needs nothing but a browser.

It reads what `winnow run --json` and `winnow bench --json` wrote; `measure` adds what they do not
have. `figures` draws, `page` writes.
"""

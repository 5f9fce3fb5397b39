"""The live dashboard: local web pages over run stores, which it only reads.

`runs` finds the runs, `live_run` keeps what is known of one, `alerts`, `fleet_facts` and `story` say
what it means, `chart` draws, `pages` puts it into templates, `app` and `server` answer a browser.
"""

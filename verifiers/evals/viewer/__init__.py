"""The page that shows evaluations: written as one file, or served from a folder of runs.

    writing.py      report.html of one run, or of two side by side
    serving.py      the same page over a folder of runs, following live ones
    runs.py         run directories: found under a folder, followed while they grow
    data.py         rows of results.jsonl -> what the page's script reads
    transcripts.py  messages of any shape -> the one shape that the page draws
    summary.py      numbers with intervals
    page.py         the HTML around it: style, script, and a policy that lets nothing else run

The script (its files joined, in the order that page.py gives) makes elements and sets their text; it never parses
text as HTML.
"""

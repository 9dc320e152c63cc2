# Starts the playbook, and kills its process after ten calls.
rm -f calls.txt
noetl-dagster run calls.yaml &
until [ "$(cat calls.txt 2>/dev/null | wc -l)" -ge 10 ]; do sleep 0.05; done
kill -9 $!

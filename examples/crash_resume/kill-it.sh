# Starts the playbook, and kills its process when ten calls were made.
noetl-dagster run calls.yaml &
until [ "$(cat calls.txt 2>/dev/null | wc -l)" -ge 10 ]; do sleep 0.05; done
kill -9 $!

#!/bin/sh
# Measures the curves behind validation/records/window/: one report of `colibri-jax quality` per set of settings.
#     sh validation/quality/curves.sh OUT [NAME…]
# About 40 minutes on one core. OUT/windows keeps what was measured, so that the same command goes on after an interruption.
set -eu
out=$1
shift
mkdir -p "$out"
text=$(dirname "$0")/../train/heldout.jsonl
every="--denominators survivors,frozen"

measure() {
    name=$1
    shift
    case " $chosen " in *" $name "* | "  ") ;; *) return 0 ;; esac
    colibri-jax quality --text "$text" --threads 1 --resume "$out/windows" --json "$@" > "$out/$name.part"
    mv "$out/$name.part" "$out/$name.json"
}

chosen=$*
decode="--scopes decode --tokens 20160"
verify="--scopes verify --tokens 20160"
prefill="--scopes prefill --tokens 20480"
measure decode $decode $every --budgets 8,7,6,5,4,3,2 --policies aggregate,floor,substitute,per_position --votes weights,all_scores
measure decode_coverage $decode $every --budgets off --policies coverage --coverage 0.5,0.6,0.7,0.75,0.8,0.85,0.9,0.95
measure verify $verify $every --budgets 4,6,8,12,14,16,20,24,32 --policies aggregate,substitute,floor
measure verify_per $verify $every --budgets 7,6,5,4,3,2 --policies per_position
measure verify_coverage $verify $every --budgets off --policies coverage --coverage 0.5,0.6,0.7,0.8,0.85,0.9,0.95
measure verify_votes $verify $every --budgets 8,12,16,20 --policies aggregate,substitute --votes all_scores
measure prefill $prefill $every --budgets 64,56,48,40,32,24,16,8 --policies aggregate,floor,substitute
measure prefill_per $prefill $every --budgets 7,6,5,4,3,2 --policies per_position
measure prefill_coverage $prefill $every --budgets off --policies coverage --coverage 0.5,0.7,0.8,0.9,0.95,0.98
measure prefill_votes $prefill $every --budgets 56,48,32,16,8 --policies aggregate,substitute --votes all_scores
measure damage --scopes prefill_then_decode,all --tokens 20480 $every --budgets 8,16,32,48 --policies aggregate,floor,substitute
measure cached --scopes decode --tokens 4032 $every --budgets 6,4,2 --policies resident --cache-experts 16 --allow-irreproducible
measure swapped --scopes decode --tokens 4032 --budgets off --policies cache_route --cache-experts 16 --allow-irreproducible
lists=
for n in 7 6 5 4 3; do
    lists=$lists,$n:0:0:0:0,0:$n:0:0:0,0:0:$n:0:0,0:0:0:$n:0,0:0:0:0:$n
done
measure layers --scopes decode --tokens 4032 --denominators frozen --budgets "${lists#,},6:5:5:5:5,5:5:5:5:6,7:6:6:6:6,6:6:6:6:7,5,6"

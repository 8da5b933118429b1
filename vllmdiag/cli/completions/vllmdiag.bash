# Completion of vllmdiag for bash. The program itself says what may stand here: verbs, options, live pids, causes.
_vllmdiag() {
    local found=() notes=() word note i
    while IFS=$'\t' read -r word note; do
        found+=("$word") notes+=("$note")
    done < <(VLLMDIAG_COMPLETE=1 "$1" "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    COMPREPLY=()
    if ((${#found[@]} > 1)) && [[ $COMP_TYPE == 63 ]]; then # a list is shown: each with its note
        for i in "${!found[@]}"; do COMPREPLY+=("${found[i]}${notes[i]:+  (${notes[i]})}"); done
    else
        COMPREPLY=("${found[@]}")
    fi
}
complete -o default -o nosort -F _vllmdiag vllmdiag

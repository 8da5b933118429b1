#compdef vllmdiag
# Completion of vllmdiag for zsh. The program itself says what may stand here: verbs, options, live pids, causes.
_vllmdiag() {
    local -a found
    local line
    for line in "${(@f)$(VLLMDIAG_COMPLETE=1 "${words[1]}" "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -n $line ]] && found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done
    if (( $#found )); then
        _describe -V 'vllmdiag' found
    else
        _files
    fi
}
if [[ $funcstack[1] == _vllmdiag ]]; then # loaded from fpath
    _vllmdiag "$@"
else # read by `source` or `eval`
    compdef _vllmdiag vllmdiag
fi

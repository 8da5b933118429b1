/* A libnvidia-ml.so.1 with eight GPUs that the real pynvml loads. The environment says what ails them:
   NVMLSTUB is a list of words: nodriver, mismatch, noperm, lost=N, lostlate=N, remapped=N, throttled=N, idle=N, working,
   hang=N, nofabric=N, linkdown=N, ecc=N. A symbol that is absent here makes pynvml raise FunctionNotFound. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int result;
typedef void *device;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, TOO_SMALL = 7, NOT_LOADED = 9, LOST = 15, MISMATCH = 18 };
enum { GPUS = 8 };

static int said(const char *word) {
    const char *text = getenv("NVMLSTUB");
    return text && strstr(text, word);
}

/* Whether "word=N" names this device. */
static int ails(const char *word, device d) {
    char key[64];
    snprintf(key, sizeof key, "%s=%ld", word, (long)d - 1);
    return said(key);
}

static result reach(device d) { return ails("lost", d) ? LOST : OK; }
#define REACH(d) do { result r = reach(d); if (r) return r; } while (0)

typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
typedef struct { unsigned gpu, memory; } rates;
typedef struct { unsigned long long total, unused, used; } memory;
typedef struct { char legacy[16]; unsigned domain, bus, device, ids, subsystem; char id[32]; } pci;
typedef struct { unsigned version; unsigned char cluster[16]; result status; unsigned clique; unsigned char state; unsigned mask; } fabric;
typedef struct { unsigned field, scope; long long at, latency; int kind; result status; union { double d; unsigned u; unsigned long long l; } value; } field;

result nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return said("nodriver") ? NOT_LOADED : said("mismatch") ? MISMATCH : said("noperm") ? NO_PERMISSION : OK;
}
result nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(result r) { return r == LOST ? "GPU is lost" : r == MISMATCH ? "Driver/library version mismatch" : "stub error"; }
result nvmlSystemGetDriverVersion(char *text, unsigned n) { snprintf(text, n, "580.95.05"); return OK; }
result nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
result nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }
result nvmlDeviceGetCount_v2(unsigned *n) { *n = GPUS; return OK; }
result nvmlDeviceGetHandleByIndex_v2(unsigned i, device *d) {
    if (i >= GPUS) return INVALID;
    *d = (device)(long)(i + 1);
    return OK;
}
result nvmlDeviceGetName(device d, char *text, unsigned n) { REACH(d); snprintf(text, n, "NVIDIA H200"); return OK; }
result nvmlDeviceGetUUID(device d, char *text, unsigned n) { REACH(d); snprintf(text, n, "GPU-0000000%ld", (long)d - 1); return OK; }
result nvmlDeviceGetMinorNumber(device d, unsigned *minor) { REACH(d); *minor = (unsigned)(long)d - 1; return OK; }
result nvmlDeviceGetPciInfo_v3(device d, pci *info) { REACH(d); memset(info, 0, sizeof *info); snprintf(info->id, 32, "00000000:%02lX:00.0", 0x60 + (long)d); return OK; }
result nvmlDeviceGetMaxClockInfo(device d, int kind, unsigned *mhz) { REACH(d); (void)kind; *mhz = 1980; return OK; }
result nvmlDeviceGetClockInfo(device d, int kind, unsigned *mhz) { REACH(d); (void)kind; *mhz = ails("throttled", d) ? 345 : 1980; return OK; }
result nvmlDeviceGetEnforcedPowerLimit(device d, unsigned *mw) { REACH(d); *mw = 700000; return OK; }
result nvmlDeviceGetTemperatureThreshold(device d, int kind, unsigned *c) { REACH(d); (void)kind; *c = 90; return OK; }
result nvmlDeviceGetTemperature(device d, int sensor, unsigned *c) { REACH(d); (void)sensor; *c = ails("throttled", d) ? 93 : 41; return OK; }
result nvmlDeviceGetUtilizationRates(device d, rates *r) {
    REACH(d);
    r->gpu = ails("idle", d) ? 0 : 100;
    r->memory = said("working") ? 61 : 0;
    return OK;
}
result nvmlDeviceGetPowerUsage(device d, unsigned *mw) {
    REACH(d);
    if (ails("hang", d)) sleep(3600);
    *mw = said("working") ? 512000 : ails("idle", d) ? 74000 : 128000;
    return OK;
}
result nvmlDeviceGetMemoryInfo(device d, memory *m) { REACH(d); m->total = 150754820096ULL; m->used = 135000000000ULL; m->unused = m->total - m->used; return OK; }
result nvmlDeviceGetCurrentClocksEventReasons(device d, unsigned long long *bits) { REACH(d); *bits = ails("throttled", d) ? 0x48 : 0; return OK; }
result nvmlDeviceGetCurrPcieLinkWidth(device d, unsigned *n) { REACH(d); *n = 16; return OK; }
result nvmlDeviceGetMaxPcieLinkWidth(device d, unsigned *n) { REACH(d); *n = 16; return OK; }
result nvmlDeviceGetCurrPcieLinkGeneration(device d, unsigned *n) { REACH(d); *n = 5; return OK; }
result nvmlDeviceGetPcieReplayCounter(device d, unsigned *n) { REACH(d); *n = 0; return OK; }
result nvmlDeviceGetTotalEccErrors(device d, int kind, int counter, unsigned long long *n) { REACH(d); (void)kind; (void)counter; *n = ails("ecc", d) ? 7 : 0; return OK; }
result nvmlDeviceGetRemappedRows(device d, unsigned *fixed, unsigned *broken, unsigned *pending, unsigned *failed) {
    REACH(d);
    *fixed = 0;
    *broken = ails("remapped", d) ? 2 : 0;
    *pending = ails("remapped", d);
    *failed = 0;
    return OK;
}
result nvmlDeviceGetFieldValues(device d, int n, field *fields) {
    REACH(d);
    for (int i = 0; i < n; i++) { fields[i].status = OK; fields[i].value.u = ails("remapped", d) ? 1 : 0; }
    return OK;
}
result nvmlDeviceGetGpuFabricInfoV(device d, fabric *f) { REACH(d); f->state = ails("nofabric", d) ? 2 : 3; f->status = OK; return OK; }
result nvmlDeviceGetNvLinkState(device d, unsigned link, unsigned *up) { REACH(d); if (link >= 4) return INVALID; *up = !(link == 3 && ails("linkdown", d)); return OK; }
result nvmlDeviceGetNvLinkErrorCounter(device d, unsigned link, int kind, unsigned long long *n) { REACH(d); (void)link; (void)kind; *n = 0; return OK; }
result nvmlDeviceGetCudaComputeCapability(device d, int *major, int *minor) { REACH(d); *major = 9; *minor = 0; return OK; }
result nvmlDeviceGetIndex(device d, unsigned *index) { REACH(d); *index = (unsigned)(long)d - 1; return OK; }
result nvmlDeviceGetTopologyCommonAncestor(device d, device other, int *level) { REACH(d); (void)other; *level = 40; return OK; }
result nvmlDeviceGetP2PStatus(device d, device other, int kind, int *status) { REACH(d); (void)other; (void)kind; *status = ails("nop2p", d) ? 1 : 0; return OK; }
result nvmlDeviceGetMigMode(device d, unsigned *now, unsigned *next) { REACH(d); (void)now; (void)next; return NOT_SUPPORTED; }
result nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *n, process *found) {
    REACH(d);
    unsigned room = *n;
    *n = 1;
    if (room < 1) return TOO_SMALL;
    found[0].pid = 4242 + (unsigned)(long)d;
    found[0].used = 133000000000ULL;
    found[0].gi = found[0].ci = ~0u;
    return OK;
}

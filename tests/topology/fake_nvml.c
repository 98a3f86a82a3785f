/* NVML's entry points, as nvidia-ml-py loads them, over a machine that $FAKE_NVML names:
 *
 *   nvlink    8 H200, each with 18 links into NVSwitches whose addresses are hidden
 *   pcie      8 L40S below PCIe switches in pairs, two sockets, no peer access from one to the other
 *   mixed     A100 and A6000 without NVSwitches: a bridge joins 0 and 1, one with a link down joins 2 and 3, one
 *             joins 4 and a GPU that this container was not given; 6 has MIG on
 *   failing   pcie, where calls fail, GPU 5 is lost, and answers make no sense
 *   old       4 V100 on NVSwitches under a driver of 2019; compiled with -DOLD, which leaves out later entry points
 *   broken    nvmlInit finds a kernel module of another version
 *   unloaded  nvmlInit finds no kernel module
 *
 * nvmlShutdown says so on stderr.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15,
       VERSION_MISMATCH = 18, UNKNOWN = 999 };
enum { TO_GPU = 0, TO_SWITCH = 2 };

typedef struct { int index; } *gpu_t;
typedef struct {
    char old_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type, result;
    union { unsigned as_unsigned; unsigned long long as_long; double as_double; } value;
} field_t;

static struct { int index; } gpus[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
static const unsigned char buses[8] = {0x18, 0x2a, 0x3a, 0x5d, 0x9a, 0xab, 0xba, 0xdb};

static int machine(const char *name) {
    const char *chosen = getenv("FAKE_NVML");
    return chosen && strcmp(chosen, name) == 0;
}
static int failing(gpu_t gpu, int index) { return machine("failing") && gpu->index == index; }
static int a6000(gpu_t gpu) { return machine("mixed") && (gpu->index == 2 || gpu->index == 3); }
static int count(void) { return machine("old") ? 4 : 8; }
static int socket_of(gpu_t gpu) { return gpu->index >= count() / 2; }
static int say(char *to, unsigned size, const char *text) { return snprintf(to, size, "%s", text) < 0; }

static int address(pci_t *pci, int index) {
    memset(pci, 0, sizeof *pci);
    pci->domain = machine("pcie") && index >= 4; /* as where each socket is a domain of its own */
    pci->bus = buses[index];
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return machine("broken") ? VERSION_MISMATCH : machine("unloaded") ? DRIVER_NOT_LOADED : OK;
}
int nvmlShutdown(void) {
    fputs("nvmlShutdown\n", stderr);
    return machine("failing") ? UNKNOWN : OK;
}
const char *nvmlErrorString(int code) { (void)code; return "an error"; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) {
    return say(to, size, machine("old") ? "418.87" : "550.54.15");
}
int nvmlSystemGetNVMLVersion(char *to, unsigned size) {
    return say(to, size, machine("old") ? "10.418.87" : "12.550.54.15");
}
int nvmlSystemGetCudaDriverVersion(int *version) { *version = machine("old") ? 10010 : 12040; return OK; }
int nvmlDeviceGetCount_v2(unsigned *number) { *number = count(); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t *gpu) {
    *gpu = (gpu_t)&gpus[index];
    return failing(*gpu, 5) ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t *gpu) {
    *gpu = (gpu_t)&gpus[uuid[4] - '0'];
    return strncmp(uuid, "GPU-", 4) ? INVALID_ARGUMENT : failing(*gpu, 5) ? GPU_IS_LOST : OK;
}
int nvmlDeviceGetClockInfo(gpu_t gpu, unsigned type, unsigned *mhz) {
    *mhz = type != 1 ? 7 : gpu->index == 3 ? 1005 : 1980;
    return failing(gpu, 6) ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetMaxClockInfo(gpu_t gpu, unsigned type, unsigned *mhz) { *mhz = type == 1 ? 1980 : 7; return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(gpu_t gpu, unsigned long long *bits) {
    *bits = gpu->index == 3 ? 0x25 : 1; /* power limit, too hot, idle */
    return failing(gpu, 7) ? NO_PERMISSION : OK;
}

int nvmlDeviceGetName(gpu_t gpu, char *to, unsigned size) {
    return say(to, size, machine("nvlink") ? "NVIDIA H200" : machine("old") ? "Tesla V100-SXM3-32GB" :
               a6000(gpu) ? "NVIDIA RTX A6000" : machine("mixed") ? "NVIDIA A100 80GB PCIe" : "NVIDIA L40S");
}
int nvmlDeviceGetUUID(gpu_t gpu, char *to, unsigned size) { return snprintf(to, size, "GPU-%d", gpu->index) < 0; }
int nvmlDeviceGetPciInfo_v3(gpu_t gpu, pci_t *pci) { return address(pci, gpu->index); }
int nvmlDeviceGetMemoryInfo(gpu_t gpu, memory_t *memory) {
    if (failing(gpu, 3)) return NO_PERMISSION;
    memory->total = 48000000000ULL;
    return OK;
}
int nvmlDeviceGetCurrPcieLinkGeneration(gpu_t gpu, unsigned *to) { *to = machine("pcie") ? 1 : 4; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(gpu_t gpu, unsigned *to) { *to = 4; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(gpu_t gpu, unsigned *to) {
    *to = machine("pcie") && gpu->index == 3 ? 8 : 16;
    return failing(gpu, 2) ? UNKNOWN : OK;
}
int nvmlDeviceGetMaxPcieLinkWidth(gpu_t gpu, unsigned *to) { *to = 16; return OK; }
int nvmlDeviceGetCudaComputeCapability(gpu_t gpu, int *major, int *minor) {
    *major = machine("nvlink") ? 9 : machine("old") ? 7 : 8;
    *minor = machine("nvlink") || machine("old") ? 0 : a6000(gpu) ? 6 : machine("mixed") ? 0 : 9;
    return OK;
}
int nvmlDeviceGetCpuAffinity(gpu_t gpu, unsigned size, unsigned long long *words) {
    memset(words, 0, size * sizeof *words);
    if (failing(gpu, 6)) return OK;
    for (int cpu = 0; cpu < 24; cpu++) { /* threads of a core are 48 apart: 0-23,48-71 and 24-47,72-95 */
        int near = cpu + 24 * socket_of(gpu);
        words[near / 64] |= 1ULL << near % 64;
        words[(near + 48) / 64] |= 1ULL << (near + 48) % 64;
    }
    return OK;
}

#ifndef OLD
int nvmlDeviceGetMemoryAffinity(gpu_t gpu, unsigned size, unsigned long long *words, unsigned scope) {
    memset(words, 0, size * sizeof *words);
    words[0] = failing(gpu, 7) ? 3 : failing(gpu, 6) ? 0 : 1ULL << socket_of(gpu);
    return scope == 0 ? OK : INVALID_ARGUMENT;
}
int nvmlDeviceGetMigMode(gpu_t gpu, unsigned *now, unsigned *later) {
    *now = *later = machine("mixed") && gpu->index == 6;
    return machine("nvlink") || (machine("mixed") && !a6000(gpu)) ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(gpu_t gpu, unsigned link, unsigned *type) {
    *type = machine("nvlink") ? TO_SWITCH : TO_GPU;
    return OK;
}
#endif

static int links(gpu_t gpu) { return machine("nvlink") ? 18 : machine("old") ? 6 : a6000(gpu) ? 4 : 12; }

int nvmlDeviceGetNvLinkState(gpu_t gpu, unsigned link, unsigned *up) {
    if (failing(gpu, 1)) return UNKNOWN;
    if (machine("pcie") || machine("failing")) return NOT_SUPPORTED;
    if (link >= (unsigned)links(gpu)) return INVALID_ARGUMENT;
    if (machine("mixed")) *up = gpu->index < 2 || gpu->index == 4 || (a6000(gpu) && link != 1);
    else *up = !(machine("old") && gpu->index == 3 && link == 5);
    return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu_t gpu, unsigned link, pci_t *pci) {
    if (machine("nvlink")) return UNKNOWN;
    address(pci, gpu->index ^ 1);
    if (machine("old")) pci->bus = 0xe0 + link; /* an NVSwitch */
    if (machine("mixed") && gpu->index == 4) pci->bus = 0xf0;
    return OK;
}
int nvmlDeviceGetFieldValues(gpu_t gpu, int number, field_t *values) {
    if (machine("old")) return NOT_SUPPORTED;
    for (int i = 0; i < number; i++) {
        int of_link = values[i].field == 164;
        values[i].result = machine("nvlink") == of_link && !a6000(gpu) ? OK : NOT_SUPPORTED;
        values[i].type = of_link ? 1 : 3;
        if (of_link) values[i].value.as_unsigned = 26562;
        else values[i].value.as_long = 25000;
    }
    return OK;
}

int nvmlDeviceGetTopologyCommonAncestor(gpu_t a, gpu_t b, unsigned *level) {
    int neighbours = a->index / 2 == b->index / 2;
    if (socket_of(a) != socket_of(b)) *level = 50;
    else if (machine("mixed")) *level = neighbours ? 20 : 30;
    else *level = neighbours && !machine("nvlink") ? 10 : 40;
    if (failing(a, 6) && b->index == 7) *level = 0; /* on one board */
    return OK;
}
int nvmlDeviceGetP2PStatus(gpu_t a, gpu_t b, unsigned capability, unsigned *status) {
    int far = socket_of(a) != socket_of(b);
    if (machine("pcie") || machine("failing")) *status = far ? 1 : 0;
    else *status = machine("mixed") && a->index / 2 != b->index / 2 ? 5 : 0;
    if (failing(a, 0) && b->index == 4) *status = 6;
    return capability == 0 ? OK : INVALID_ARGUMENT;
}

/* The slots of devices in a context, which Meta.device counts, by name. */
#ifndef MF_SLOTS_H
#define MF_SLOTS_H

enum { DEVICE_SLOTS = 16 };

/* In texts of graphs and plans: cpu, meta, cuda, cuda1, ... */
extern const char *const device_slot_names[DEVICE_SLOTS];

#endif

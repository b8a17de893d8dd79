/* Reading what placement_text and sbp_list_text print, into the scan's arena. */
#ifndef MF_PLACEMENT_SCAN_H
#define MF_PLACEMENT_SCAN_H
#include "placement.h"
#include "scan.h"

const Placement *placement_scan(Scan *s);
SbpList sbp_list_scan(Scan *s, int n_axes);

#endif

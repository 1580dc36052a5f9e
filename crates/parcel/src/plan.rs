//! Compares what it takes to move guests' disks over the link, and by courier.

/// Seconds of a day.
const DAY_S: f64 = 86_400.0;
/// Bytes of a gigabyte, as providers of links count.
const GB: f64 = 1e9;

/// An operator's figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// Bytes of all disks that are allocated.
    pub bytes: f64,
    /// The number of guests that have them.
    pub guests: u64,
    /// The rate of the link in bits per second.
    pub link_bps: f64,
    /// Bytes of the disks that differ from one day to the next.
    pub changed_per_day: f64,
    /// Days from the start of the export until the courier comes; less if the export takes longer.
    pub leaves_days: f64,
    /// Days that the courier takes.
    pub courier_days: f64,
    /// What the courier costs.
    pub courier_cost: f64,
    /// What 1,000,000,000 bytes over the link cost.
    pub link_cost_per_gb: f64,
    /// How fast the devices of the parcel are written or read, together, in bytes per second.
    pub device_rate: f64,
    /// How fast the disks of the guests are read or written, in bytes per second.
    pub disk_rate: f64,
}

/// What one way takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Way {
    /// Seconds until the devices leave; 0 over the link.
    pub leaves_s: f64,
    /// Seconds until the disks are imported; 0 over the link.
    pub imported_s: f64,
    /// Seconds until everything is there. `None` if the disks change faster than the link carries.
    pub done_s: Option<f64>,
    /// Bytes over the link. `None` as above.
    pub link_bytes: Option<f64>,
    /// What it costs. `None` as above.
    pub cost: Option<f64>,
    /// The rate of the link, in bits per second, above which the link alone is done earlier. `None`
    /// for the link itself, and where no rate is slow enough for the parcel.
    pub loses_above_bps: Option<f64>,
}

/// The three ways.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Everything travels over the link.
    pub link: Way,
    /// The parcel leaves as it was exported; all changes since travel over the link.
    pub parcel: Way,
    /// It is topped up just before it leaves.
    pub topped_up: Way,
    /// The number of such guests from which on the parcel is done earlier. `None` if it never is.
    pub guests_from: Option<u64>,
}

/// Returns the seconds that bytes take over a link of that many bits per second, with nothing that
/// changes meanwhile.
pub fn link_s(bytes: f64, link_bps: f64) -> f64 {
    bytes * 8.0 / link_bps
}

/// Returns the number of guests from which on a parcel is done earlier: it takes `fixed_s` for any
/// number of guests, and `parcel_s` for each one instead of `link_s`.
pub fn guests_from(fixed_s: f64, link_s: f64, parcel_s: f64) -> Option<u64> {
    let saved_s = link_s - parcel_s;
    let guests = (fixed_s / saved_s).ceil();
    match saved_s > 0.0 && guests < 1e18 {
        true => Some((guests as u64).max(1)),
        false => None,
    }
}

impl Figures {
    /// Returns how much of the disks differs after that many seconds.
    fn changed(&self, s: f64) -> f64 {
        (self.changed_per_day * s / DAY_S).min(self.bytes)
    }

    /// Returns the seconds that the link needs for these bytes, and for what changes meanwhile.
    fn catch_up_s(&self, bytes: f64) -> Option<f64> {
        let left = self.link_bps / 8.0 - self.changed_per_day / DAY_S;
        match bytes > 0.0 {
            true => Some(bytes / left).filter(|_| left > 0.0),
            false => Some(0.0),
        }
    }

    /// Returns the seconds of an export: the disks are read and the devices written at the same
    /// time, and then the devices are read back.
    fn export_s(&self) -> f64 {
        self.bytes / self.device_rate.min(self.disk_rate) + self.bytes / self.device_rate
    }

    /// Returns the seconds of a top-up: the disks are read and compared, what has changed is
    /// written, and the devices are read back.
    fn top_up_s(&self, changed: f64) -> f64 {
        let written = changed / self.device_rate;
        self.bytes / self.disk_rate + written + (self.bytes + changed) / self.device_rate
    }

    /// Returns the seconds of an import: the devices are read and the disks written at the same
    /// time, and then the disks are read back. `bytes` are on the devices.
    fn import_s(&self, bytes: f64) -> f64 {
        bytes / self.device_rate.min(self.disk_rate) + self.bytes / self.disk_rate
    }

    /// Returns what a way takes that brings content until `imported_s`, and `missing` bytes of it
    /// not.
    fn way(&self, (leaves_s, imported_s): (f64, f64), missing: f64, courier: f64) -> Way {
        let link_s = self.catch_up_s(missing);
        let link_bytes = link_s.map(|s| match missing > 0.0 {
            true => s * self.link_bps / 8.0,
            false => 0.0,
        });
        let saved = self.bytes - missing;
        let is_parcel = imported_s > 0.0 && saved > 0.0;
        let loses_above = self.changed_per_day / DAY_S + saved / imported_s;
        Way {
            leaves_s,
            imported_s,
            done_s: link_s.map(|s| imported_s + s),
            link_bytes,
            cost: link_bytes.map(|bytes| courier + bytes / GB * self.link_cost_per_gb),
            loses_above_bps: is_parcel.then_some(loses_above * 8.0),
        }
    }

    /// Compares the ways.
    pub fn compare(&self) -> Comparison {
        let courier_s = self.courier_days * DAY_S;
        let export_s = self.export_s();
        let link = self.way((0.0, 0.0), self.bytes, 0.0);

        let leaves_s = export_s.max(self.leaves_days * DAY_S);
        let imported_s = leaves_s + courier_s + self.import_s(self.bytes);
        // A chunk is as it was when it was read, which was at the start at the earliest.
        let missing = self.changed(imported_s);
        let parcel = self.way((leaves_s, imported_s), missing, self.courier_cost);

        // The top-up ends when the courier comes, or follows the export at once.
        let begins = |changed| (leaves_s - self.top_up_s(changed)).max(export_s);
        let changed = self.changed(begins(self.changed(leaves_s)));
        let (begins_s, top_up_s) = (begins(changed), self.top_up_s(changed));
        let leaves_s = (begins_s + top_up_s).max(leaves_s);
        let imported_s = leaves_s + courier_s + self.import_s(self.bytes + changed);
        let missing = self.changed(imported_s - begins_s);
        let topped_up = self.way((leaves_s, imported_s), missing, self.courier_cost);

        let each = |s: f64| s / self.guests.max(1) as f64;
        let fixed_s = parcel.leaves_s - export_s + courier_s;
        let all = link.done_s.zip(parcel.done_s);
        let guests_from = all.and_then(|(link_s, parcel_s)| {
            guests_from(fixed_s, each(link_s), each(parcel_s - fixed_s))
        });
        Comparison {
            link,
            parcel,
            topped_up,
            guests_from,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1,000 guests with 50 GB each, as in table 3.1 of paper 002; nothing changes, and devices and
    /// disks take no time.
    fn papers() -> Figures {
        Figures {
            bytes: 50e12,
            guests: 1000,
            link_bps: 155e6,
            changed_per_day: 0.0,
            leaves_days: 0.0,
            courier_days: 15.0 / 24.0,
            courier_cost: 200.0,
            link_cost_per_gb: 0.0,
            device_rate: f64::INFINITY,
            disk_rate: f64::INFINITY,
        }
    }

    #[test]
    fn the_links_of_table_3_1_take_the_days_that_it_says() {
        // T3, OC3, OC12. The table gives whole days and drops the rest. Its monthly costs are
        // figures of providers, which nothing here is computed from.
        for (mbit, days) in [(44.76, 103.0), (155.0, 29.0), (622.0, 7.0)] {
            let figures = Figures {
                link_bps: mbit * 1e6,
                ..papers()
            };
            let done_s = figures.compare().link.done_s.unwrap();
            assert_eq!((done_s / DAY_S).floor(), days, "{mbit} Mbit/s");
            assert_eq!(done_s, link_s(50e12, mbit * 1e6));
        }
    }

    #[test]
    fn a_box_of_50_tb_in_15_hours_is_a_link_of_more_than_7_gbit() {
        let Comparison { parcel, .. } = papers().compare();
        let threshold = parcel.loses_above_bps.unwrap();
        assert!((7.4e9..7.41e9).contains(&threshold), "{threshold}");
        // About three times an OC-48, as the paper says.
        assert_eq!((threshold / 2.488e9).round(), 3.0);
        assert_eq!((parcel.cost, parcel.link_bytes), (Some(200.0), Some(0.0)));
        // At the threshold both are done at the same time.
        let at = Figures {
            link_bps: threshold,
            ..papers()
        };
        let at = at.compare();
        let differ_s = at.link.done_s.unwrap() - at.parcel.done_s.unwrap();
        assert!(differ_s.abs() < 1.0, "{differ_s}");
    }

    #[test]
    fn the_thresholds_of_table_5_2_follow_from_what_a_guest_saves() {
        // The table's rows are 345, 361 and 251 guests for a courier of 12 hours. They cannot be
        // computed from the paper's inputs: the times of one guest's moves are in figure 5.1(a)
        // only, a picture without numbers. The sizes of table 5.1 (40, 40 and 164 GB) do not
        // replace them, because the paper does not say the rate of the link: the first two rows
        // would be equal, and the third four times smaller. What the text says is consistent with
        // the first row: 12 s are 8.3 % ("nearly 10 %") of the local move of the idle guest, and a
        // parcel takes "one fifth" of a move over the link.
        let fixed_s = 12.0 * 3600.0;
        let local_s = 12.0 / 0.083;
        let link_s = local_s + 12.0;
        assert_eq!(guests_from(fixed_s, link_s, link_s / 5.0), Some(345));
        // A guest more, and the parcel is earlier; a guest less, and it is not.
        for (saved_s, guests) in [(120.0, 360), (119.9, 361), (43_200.0, 1), (90_000.0, 1)] {
            assert_eq!(guests_from(fixed_s, saved_s + 7.0, 7.0), Some(guests));
            let link_is_later =
                |guests: u64| guests as f64 * (saved_s + 7.0) >= fixed_s + guests as f64 * 7.0;
            assert!(link_is_later(guests) && (guests == 1 || !link_is_later(guests - 1)));
        }
        assert_eq!(guests_from(fixed_s, 7.0, 7.0), None);
        assert_eq!(guests_from(fixed_s, 6.0, 7.0), None);
    }

    /// 20 TB over 100 Mbit/s, of which 0.5 % changes in a day.
    fn usual() -> Figures {
        Figures {
            bytes: 20e12,
            guests: 40,
            link_bps: 100e6,
            changed_per_day: 100e9,
            leaves_days: 10.0,
            courier_days: 1.0,
            courier_cost: 300.0,
            link_cost_per_gb: 0.05,
            device_rate: 400e6,
            disk_rate: 1e9,
        }
    }

    fn is_near(value: f64, expected: f64) {
        let differs = (value - expected).abs();
        assert!(differs <= expected * 1e-9, "{value}, not {expected}");
    }

    #[test]
    fn what_changes_meanwhile_travels_too() {
        let Comparison {
            link,
            parcel,
            topped_up,
            guests_from,
        } = usual().compare();
        // 12.5 MB/s, of which changes take 100 GB of a day.
        let left = 12.5e6 - 100e9 / DAY_S;
        is_near(link.done_s.unwrap(), 20e12 / left);
        is_near(link.link_bytes.unwrap(), 12.5e6 * 20e12 / left);
        assert_eq!(link.loses_above_bps, None);
        // 10 days, 1 day, 50,000 s to write and 20,000 s to read back.
        is_near(parcel.leaves_s, 10.0 * DAY_S);
        is_near(parcel.imported_s, 11.0 * DAY_S + 70_000.0);
        let missing = 100e9 * (11.0 + 70_000.0 / DAY_S);
        is_near(parcel.done_s.unwrap(), parcel.imported_s + missing / left);
        let cost = 300.0 + 12.5e6 * missing / left / 1e9 * 0.05;
        is_near(parcel.cost.unwrap(), cost);
        // The top-up ends when the courier comes, and spares what changed in its ten days.
        is_near(topped_up.leaves_s, 10.0 * DAY_S);
        assert!(topped_up.link_bytes.unwrap() < parcel.link_bytes.unwrap() / 3.0);
        assert!(topped_up.done_s < parcel.done_s && parcel.done_s < link.done_s);
        assert!(topped_up.loses_above_bps > parcel.loses_above_bps);
        assert!((1..40).contains(&guests_from.unwrap()));
        // At its threshold each is as late as the link.
        for way in [parcel, topped_up] {
            let threshold = way.loses_above_bps.unwrap();
            let at = Figures {
                link_bps: threshold,
                ..usual()
            };
            let at_rate = at.compare();
            let same = [at_rate.parcel, at_rate.topped_up];
            let same = same.iter().find(|it| it.loses_above_bps == Some(threshold));
            is_near(same.unwrap().done_s.unwrap(), at_rate.link.done_s.unwrap());
        }
    }

    #[test]
    fn a_courier_who_comes_at_once_waits_for_the_export_and_the_top_up() {
        let figures = Figures {
            leaves_days: 0.0,
            ..usual()
        };
        let compared = figures.compare();
        is_near(compared.parcel.leaves_s, 100_000.0);
        let changed = 100e9 * 100_000.0 / DAY_S;
        let top_up_s = 20_000.0 + changed / 400e6 + (20e12 + changed) / 400e6;
        is_near(compared.topped_up.leaves_s, 100_000.0 + top_up_s);
    }

    #[test]
    fn disks_that_change_faster_than_the_link_are_never_there() {
        let figures = Figures {
            changed_per_day: 12.5e6 * DAY_S,
            ..usual()
        };
        let compared = figures.compare();
        for way in [compared.link, compared.parcel, compared.topped_up] {
            assert_eq!((way.done_s, way.link_bytes, way.cost), (None, None, None));
        }
        assert_eq!(compared.guests_from, None);
        // A faster link would end, and up to some rate the parcel would be earlier.
        assert!(compared.parcel.loses_above_bps > Some(figures.link_bps));
        // Where all has changed meanwhile, the parcel brings nothing.
        let figures = Figures {
            changed_per_day: 2e12,
            ..usual()
        };
        assert_eq!(figures.compare().parcel.loses_above_bps, None);
    }
}

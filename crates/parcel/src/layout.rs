//! Which device has which cell of a row.

/// The most devices of a parcel.
pub const DEVICES_MAX: usize = 255;
/// The most cells of a device.
pub(crate) const CELLS_MAX: u64 = 1 << 40;
/// The most parity cells of a row.
const PARITY_MAX: u8 = 2;

/// Why devices cannot be a parcel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Too few, or too many.
    #[error("a parcel has 1 to {DEVICES_MAX} devices, not {0}")]
    Devices(usize),
    /// More parity than the format has.
    #[error("a parcel survives the loss of 0, 1 or 2 devices, not of {0}")]
    Parity(u8),
    /// Nothing would be left for data.
    #[error("{devices} devices cannot survive the loss of {parity}: at least one more is needed")]
    NoData {
        /// How many there are.
        devices: usize,
        /// How many may be lost.
        parity: u8,
    },
    /// Too large.
    #[error("a device has at most 2^40 cells of 1 MiB, not {0}")]
    Cells(u64),
}

/// The capacities of a parcel's devices, and its parity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    cells: Vec<u64>,
    parity: u8,
}

/// The devices of a row's cells, by their numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roles {
    /// P and Q, as many as there are.
    pub parity: Vec<usize>,
    /// The data, in the order of the log.
    pub data: Vec<usize>,
}

impl Layout {
    /// Creates the layout of devices with these capacities, in cells.
    ///
    /// # Errors
    /// When they cannot be a parcel.
    pub fn new(cells: &[u64], parity: u8) -> Result<Self, LayoutError> {
        let devices = cells.len();
        if !(1..=DEVICES_MAX).contains(&devices) {
            return Err(LayoutError::Devices(devices));
        }
        if parity > PARITY_MAX {
            return Err(LayoutError::Parity(parity));
        }
        if devices <= usize::from(parity) {
            return Err(LayoutError::NoData { devices, parity });
        }
        match cells.iter().find(|cells| **cells > CELLS_MAX) {
            Some(cells) => Err(LayoutError::Cells(*cells)),
            None => Ok(Self {
                cells: cells.to_vec(),
                parity,
            }),
        }
    }

    /// Returns the capacities of the devices, in cells.
    pub fn cells(&self) -> &[u64] {
        &self.cells
    }

    /// Returns the number of parity cells in a row.
    pub fn parity(&self) -> u8 {
        self.parity
    }

    /// Returns the devices that take part in a row.
    pub fn devices(&self, row: u64) -> Vec<usize> {
        let each = self.cells.iter().enumerate();
        each.filter(|(_, cells)| **cells > row)
            .map(|(device, _)| device)
            .collect()
    }

    /// Returns what the devices of a row hold; `None` if it cannot have data.
    pub fn roles(&self, row: u64) -> Option<Roles> {
        let mut devices = self.devices(row);
        let parity = usize::from(self.parity);
        if devices.len() <= parity {
            return None;
        }
        let first = (row % devices.len() as u64) as usize;
        devices.rotate_left(first);
        let data = devices.split_off(parity);
        Some(Roles {
            parity: devices,
            data,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parity_goes_round_the_devices() {
        let layout = Layout::new(&[10, 10, 5], 1).unwrap();
        let parity: Vec<usize> = (0..7)
            .map(|row| layout.roles(row).unwrap().parity[0])
            .collect();
        assert_eq!(parity, [0, 1, 2, 0, 1, 1, 0]);
        assert_eq!(layout.roles(1).unwrap().data, [2, 0]);
        assert_eq!(layout.roles(10), None);
        let both = Layout::new(&[9; 4], 2).unwrap().roles(3).unwrap();
        assert_eq!((both.parity, both.data), (vec![3, 0], vec![1, 2]));
    }

    #[test]
    fn what_cannot_be_a_parcel_is_refused() {
        assert_eq!(Layout::new(&[], 0), Err(LayoutError::Devices(0)));
        assert_eq!(Layout::new(&[1; 4], 3), Err(LayoutError::Parity(3)));
        let error = Layout::new(&[1; 2], 2).unwrap_err();
        assert!(error.to_string().contains("one more is needed"), "{error}");
        assert_eq!(Layout::new(&[1 << 41], 0), Err(LayoutError::Cells(1 << 41)));
    }
}

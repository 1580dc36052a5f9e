//! The cells of one row: read, verified, and recovered.

use crate::cell::{Cell, Kind, Name};
use crate::device::Device;
use crate::header::{Bytes16, ParcelId};
use crate::layout::{Layout, Roles};
use crate::parity;
use std::ops::Range;
use std::thread;

/// The rows of a generation after its header.
#[derive(Debug, Clone)]
pub(crate) struct Generation {
    pub(crate) number: u32,
    pub(crate) nonce: Bytes16,
    pub(crate) layout: Layout,
    pub(crate) rows: Range<u64>,
}

/// Why a cell is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Missing {
    /// Its device is not there.
    Device,
    /// It was read, and is not valid.
    Damaged,
    /// It could not be read.
    Unreadable(String),
}

/// A row, as far as it could be read.
#[derive(Debug)]
pub(crate) struct Row {
    /// The data in the order of the log, those that were recovered included.
    pub(crate) data: Vec<Option<Cell>>,
    /// The devices whose cells were missing, and why.
    pub(crate) missing: Vec<(usize, Missing)>,
}

/// Returns the name of a cell of a generation's row.
pub(crate) fn name(
    parcel: &ParcelId,
    generation: &Generation,
    (row, device): (u64, usize),
    kind: Kind,
) -> Name {
    Name {
        kind,
        device: device as u16,
        row,
        parcel: parcel.short(),
        generation: generation.number,
    }
}

/// Reads the cell of a row.
fn fetch_cell(device: Option<&Device>, row: u64) -> Result<Cell, Missing> {
    let device = device.ok_or(Missing::Device)?;
    let mut cell = Cell::new();
    match device.read(row, &mut cell) {
        Ok(true) => Ok(cell),
        Ok(false) => Err(Missing::Damaged),
        Err(error) => Err(Missing::Unreadable(error.to_string())),
    }
}

/// Reads a cell, which must have this name.
pub(crate) fn read_cell(device: Option<&Device>, expected: &Name) -> Result<Cell, Missing> {
    let cell = fetch_cell(device, expected.row)?;
    match cell.name().as_ref() == Some(expected) {
        true => Ok(cell),
        false => Err(Missing::Damaged),
    }
}

/// The cells of a row as they were read: they may be of any content.
pub(crate) struct Fetched {
    roles: Roles,
    /// Those of data, and then those of parity.
    cells: Vec<(usize, Name, Result<Cell, Missing>)>,
}

/// Reads a row of a generation. Returns `None` if the row cannot have data.
pub(crate) fn fetch(
    devices: &[Option<Device>],
    parcel: &ParcelId,
    generation: &Generation,
    row: u64,
) -> Option<Fetched> {
    let roles = generation.layout.roles(row)?;
    let places = |numbers: &[usize], kind| -> Vec<(usize, Name)> {
        let each = numbers.iter().copied();
        each.map(|number| (number, name(parcel, generation, (row, number), kind)))
            .collect()
    };
    let mut all = places(&roles.data, Kind::Data);
    all.extend(places(&roles.parity, Kind::Parity));
    let cells = in_threads(all, |(number, name)| {
        let device = devices.get(number).and_then(Option::as_ref);
        (number, name, fetch_cell(device, row))
    });
    Some(Fetched { roles, cells })
}

impl Fetched {
    /// Verifies the cells, and recovers what is missing.
    pub(crate) fn verify(self, parcel: &ParcelId, generation: &Generation) -> Row {
        let cells = in_threads(self.cells, |(number, expected, cell)| {
            let valid = cell.and_then(|cell| match cell.name().as_ref() == Some(&expected) {
                true => Ok(cell),
                false => Err(Missing::Damaged),
            });
            (number, expected.row, valid)
        });
        let (mut data, mut missing) = (Vec::new(), Vec::new());
        let mut at_row = 0;
        for (number, row, cell) in cells {
            at_row = row;
            match cell {
                Ok(cell) => data.push(Some(cell)),
                Err(reason) => {
                    data.push(None);
                    missing.push((number, reason));
                }
            }
        }
        let parity = data.split_off(self.roles.data.len());
        for (at, mut cell) in recover(&data, &parity) {
            if let (Some(number), Some(place)) = (self.roles.data.get(at), data.get_mut(at)) {
                cell.finish(&name(parcel, generation, (at_row, *number), Kind::Data));
                *place = Some(cell);
            }
        }
        Row { data, missing }
    }
}

/// Calls a function for each item, at the same time.
pub(crate) fn in_threads<T: Send, R: Send>(
    mut items: Vec<T>,
    each: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let Some(last) = items.pop() else {
        return Vec::new();
    };
    let each = &each;
    thread::scope(|scope| {
        let threads = items
            .into_iter()
            .map(|item| scope.spawn(move || each(item)));
        let threads: Vec<_> = threads.collect();
        // This thread does a part of it.
        let last = each(last);
        let joined = threads.into_iter().map(|thread| {
            let done = thread.join();
            done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        joined.chain([last]).collect()
    })
}

/// Recovers missing data cells from parity, if enough is there. They have no names yet.
fn recover(data: &[Option<Cell>], parity: &[Option<Cell>]) -> Vec<(usize, Cell)> {
    let lost: Vec<usize> = (0..data.len())
        .filter(|at| matches!(data.get(*at), Some(None)))
        .collect();
    let [p, q] = [0, 1].map(|which| parity.get(which).and_then(Option::as_ref));
    let bodies: Vec<Option<&[u8]>> = data
        .iter()
        .map(|cell| cell.as_ref().map(Cell::body))
        .collect();
    match (&lost[..], p, q) {
        (&[x], Some(p), _) => {
            let mut cell = Cell::new();
            parity::p(&bodies, cell.body_mut());
            parity::add(cell.body_mut(), p.body());
            vec![(x, cell)]
        }
        (&[x], None, Some(q)) => {
            let mut cell = Cell::new();
            parity::q(&bodies, cell.body_mut());
            parity::add(cell.body_mut(), q.body());
            parity::from_q(cell.body_mut(), x);
            vec![(x, cell)]
        }
        (&[x, y], Some(p), Some(q)) => {
            let (mut a, mut b) = (Cell::new(), Cell::new());
            parity::p(&bodies, a.body_mut());
            parity::add(a.body_mut(), p.body());
            parity::q(&bodies, b.body_mut());
            parity::add(b.body_mut(), q.body());
            parity::from_both(a.body_mut(), b.body_mut(), (x, y));
            vec![(x, b), (y, a)]
        }
        _ => Vec::new(),
    }
}

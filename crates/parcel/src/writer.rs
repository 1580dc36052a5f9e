//! The writer of a parcel.

use crate::cell::{Cell, Kind};
use crate::device::{Device, DeviceError, SYNC_ROWS};
use crate::header::{Bytes16, Earlier, GENERATIONS_MAX, Header, HeaderError, ParcelId, check_name};
use crate::key::{CellKey, DataKey, Fingerprint, KeyError};
use crate::layout::{Layout, LayoutError, Roles};
use crate::log::LogWriter;
use crate::parity;
use crate::queue::{self, Queue, Ready};
use crate::reader::{self, OpenError, Parcel, Report};
use crate::record::{Record, RecordError};
use crate::row::{self, Generation};
use ring::hmac;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// Why a parcel cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// A device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The devices cannot be a parcel.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A header cannot be used.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// A key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A record is not one of the format.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The devices cannot be opened as a parcel.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// All devices are full.
    #[error("the devices are full: add another parcel for the remaining disks")]
    Full,
    /// A device could not be written.
    #[error("device {device} ({}): {error}", path.display())]
    Io {
        /// Its number.
        device: usize,
        /// Its path.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: io::Error,
    },
    /// A device could not be written or synced before, and what it has is not known.
    #[error("the parcel could not be written before: open it again")]
    Failed,
    /// The key is that of another parcel.
    #[error("this key has the fingerprint {given}, and the parcel needs {needed}")]
    OtherKey {
        /// The key's.
        given: Fingerprint,
        /// The parcel's.
        needed: Fingerprint,
    },
    /// A device is not the one with this number.
    #[error(
        "{} is not device {device} of this parcel, as it was when it was last written",
        path.display()
    )]
    OtherDevice {
        /// The number that was expected.
        device: usize,
        /// Its path.
        path: PathBuf,
    },
    /// The parcel was opened too often.
    #[error("the parcel was opened {GENERATIONS_MAX} times, and cannot go on: begin another one")]
    Generations,
    /// What was read back is not what was written.
    #[error(
        "the parcel is not sealed: what was read back from its devices is damaged; replace them \
         and export again"
    )]
    Damaged(Box<Report>),
}

/// What a parcel is called, where it goes, and what it survives.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Its name.
    pub name: String,
    /// The site that it goes to.
    pub to: String,
    /// The number of devices that may be lost: 0, 1 or 2.
    pub parity: u8,
    /// The time now, in seconds since 1970.
    pub now: u64,
}

/// How far a parcel is durable: what was put before survives a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The row of the generation's header.
    pub header: u64,
    /// The row before which everything is durable.
    pub end: u64,
}

/// Writes a generation of a parcel.
pub struct Writer {
    queue: Queue,
    header: Header,
    generation: Generation,
    keys: Vec<CellKey>,
    header_key: hmac::Key,
    log: LogWriter,
    /// The data cells of the next row, not encrypted.
    pending: Vec<Cell>,
    /// Cells that are written, and are used again.
    spare: Vec<Cell>,
    row: u64,
    synced: u64,
    durable: Position,
    /// Whether the header is on the devices. Until there is something to put, it is not: a writer
    /// that is interrupted before has not used a generation.
    is_begun: bool,
}

impl Writer {
    /// Begins a parcel on new devices.
    ///
    /// # Errors
    /// When the devices cannot be a parcel, or cannot be written.
    pub fn create(
        devices: Vec<Device>,
        settings: &Settings,
        key: &DataKey,
    ) -> Result<Self, WriteError> {
        let header = first_header(&devices, settings, key);
        let header = header.inspect_err(|_| devices.iter().for_each(Device::remove))?;
        let mut writer = Self::prepare(devices, header, key, Position { header: 0, end: 1 })?;
        match writer.begin() {
            Ok(()) => Ok(writer),
            Err(error) => {
                writer.queue.devices().iter().for_each(Device::remove);
                Err(error)
            }
        }
    }

    /// Continues a parcel. `devices` are all of its devices in the order of their numbers, and
    /// `position` is the last one that [`sync`](Self::sync) returned. What was put later does not
    /// count: put it again.
    ///
    /// # Errors
    /// When a device is not the one that it was, or cannot be written.
    pub fn reopen(
        devices: Vec<Device>,
        position: Position,
        key: &DataKey,
    ) -> Result<Self, WriteError> {
        let mut last: Option<Header> = None;
        let (mut next, mut latest) = (position.end, 0);
        let mut all_written = Vec::new();
        let given = key.fingerprint()?;
        for (number, device) in devices.iter().enumerate() {
            let io = io_of(number, device);
            let other = || WriteError::OtherDevice {
                device: number,
                path: device.path().to_path_buf(),
            };
            let written = device.written().map_err(&io)?;
            all_written.push(written);
            next = next.max(written);
            // A seal that was interrupted has begun a generation that counts for nothing.
            let name = written.checked_sub(1).map(|row| device.peek(row));
            let name = name.transpose().map_err(io)?.flatten();
            latest = latest.max(name.map_or(0, |name| name.generation));
            let header = reader::header_at(device, position.header)?;
            // A device that was full before has only earlier headers.
            let (header, proof) = match header {
                Some(found) => found,
                None => reader::header_at(device, 0)?.ok_or_else(other)?,
            };
            let needed = header.key;
            if given != needed {
                return Err(WriteError::OtherKey { given, needed });
            }
            if !proof.is_by(&key.of_headers(&header.parcel)?) {
                return Err(other());
            }
            let is_same = last
                .as_ref()
                .is_none_or(|last| last.parcel == header.parcel);
            if usize::from(header.device) != number || !is_same {
                return Err(other());
            }
            if last.as_ref().is_none_or(|last| last.row < header.row) {
                last = Some(header);
            }
        }
        let mut header = last.ok_or(LayoutError::Devices(0))?;
        if header.row != position.header || header.devices.len() != devices.len() {
            let path = devices.first().map(|device| device.path().to_path_buf());
            let path = path.unwrap_or_default();
            return Err(WriteError::OtherDevice { device: 0, path });
        }
        // An older copy of a device may be in its place.
        let each = devices.iter().zip(all_written).zip(&header.devices);
        for (number, ((device, written), cells)) in each.enumerate() {
            if !is_as_it_was(device, written, (position, *cells, header.generation))
                .map_err(io_of(number, device))?
            {
                let path = device.path().to_path_buf();
                return Err(WriteError::OtherDevice {
                    device: number,
                    path,
                });
            }
        }
        if header.earlier.len() + 2 >= GENERATIONS_MAX {
            return Err(WriteError::Generations);
        }
        header.earlier.push(Earlier {
            generation: header.generation,
            nonce: header.nonce,
            devices: header.devices.clone(),
            first: header.row,
            end: position.end.max(header.row + 1),
        });
        header.generation = header.generation.max(latest) + 1;
        header.nonce = Bytes16::draw()?;
        header.row = next;
        header.sealed = false;
        let writer = Self::prepare(devices, header, key, position)?;
        // There must be room for the header, and for the last one.
        match writer.has_row(next.saturating_add(1)) {
            true => Ok(writer),
            false => Err(WriteError::Full),
        }
    }

    /// Prepares a generation. Everything is durable up to a position of an earlier one.
    fn prepare(
        devices: Vec<Device>,
        header: Header,
        key: &DataKey,
        durable: Position,
    ) -> Result<Self, WriteError> {
        let count = u16::try_from(devices.len()).unwrap_or(u16::MAX);
        let keys = (0..count).map(|device| key.of_cells(&header.parcel, &header.nonce, device));
        let keys = keys.collect::<Result<Vec<_>, _>>()?;
        let generation = Generation {
            number: header.generation,
            nonce: header.nonce,
            layout: header.layout()?,
            rows: header.row + 1..header.row + 1,
        };
        Ok(Self {
            queue: Queue::of(devices),
            generation,
            keys,
            header_key: key.of_headers(&header.parcel)?,
            log: LogWriter::new(),
            pending: Vec::new(),
            spare: Vec::new(),
            row: header.row + 1,
            synced: header.row,
            durable: Position {
                header: durable.header,
                end: durable.end.max(durable.header + 1),
            },
            is_begun: false,
            header,
        })
    }

    /// Writes the header of the generation, if it is not there yet.
    fn begin(&mut self) -> Result<(), WriteError> {
        if self.is_begun {
            return Ok(());
        }
        let header = self.header.clone();
        self.write_header(&header)?;
        self.sync_devices()?;
        self.durable = Position {
            header: header.row,
            end: header.row + 1,
        };
        self.is_begun = true;
        Ok(())
    }

    /// Returns the paths of its devices.
    pub fn paths(&self) -> Vec<PathBuf> {
        let paths = self
            .queue
            .devices()
            .iter()
            .map(|device| device.path().to_path_buf());
        paths.collect()
    }

    /// Returns the number of rows so far, of all generations, without those of headers.
    pub fn rows(&self) -> u64 {
        let earlier = self.header.earlier.iter().map(|it| it.end - it.first - 1);
        earlier.sum::<u64>() + (self.row - self.header.row - 1)
    }

    /// Returns how far the parcel is durable, from which it can be continued.
    pub fn position(&self) -> Position {
        self.durable
    }

    /// Returns its header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    fn has_row(&self, row: u64) -> bool {
        !self.generation.layout.devices(row).is_empty()
    }

    fn write_header(&mut self, header: &Header) -> Result<(), WriteError> {
        let mut cells = Vec::new();
        for device in self.generation.layout.devices(header.row) {
            let header = Header {
                device: device as u16,
                ..header.clone()
            };
            cells.push((device, header.encode(&self.header_key)?));
        }
        queue::write_cells(self.queue.devices(), header.row, &cells)?;
        self.row = header.row + 1;
        Ok(())
    }

    /// Writes all complete rows, and syncs all devices.
    fn sync_devices(&mut self) -> Result<(), WriteError> {
        self.queue.sync(&mut self.spare)?;
        self.synced = self.row;
        Ok(())
    }

    /// Appends a record. It is durable after the next [`sync`](Self::sync).
    ///
    /// # Errors
    /// When the devices are full, or cannot be written; perhaps only the call after that says so.
    /// Then the parcel can be continued from the last position.
    pub fn put(&mut self, record: &Record) -> Result<(), WriteError> {
        let (kind, rest) = record.encode()?;
        self.put_encoded(kind, &rest)
    }

    /// Appends a record that was encoded before.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_encoded(&mut self, kind: u8, rest: &[u8]) -> Result<(), WriteError> {
        let mut full = Vec::new();
        let spare = &mut self.spare;
        self.log.push((kind, rest), |plain| {
            full.push(cell_of(plain, spare));
            Ok::<_, WriteError>(())
        })?;
        for cell in full {
            self.add(cell)?;
        }
        Ok(())
    }

    /// Adds a data cell to the next row. If the row is complete, it is encrypted, and written after
    /// those before it.
    fn add(&mut self, cell: Cell) -> Result<(), WriteError> {
        self.pending.push(cell);
        let roles = self.generation.layout.roles(self.row);
        // Behind it there must be room for the header of another generation, which may be needed
        // for that, and for the last header.
        let roles = roles.filter(|_| self.has_row(self.row + 2));
        let roles = roles.ok_or(WriteError::Full)?;
        if self.pending.len() < roles.data.len() {
            return Ok(());
        }
        self.begin()?;
        let data = std::mem::take(&mut self.pending);
        let parity = (0..roles.parity.len()).map(|_| self.spare.pop().unwrap_or_default());
        let parity = parity.collect();
        let cells = self.complete(&roles, data, parity)?;
        let row = self.row;
        self.row += 1;
        self.generation.rows.end = self.row;
        let syncs = self.row - self.synced >= SYNC_ROWS;
        if syncs {
            // Nothing is written until it is done.
            self.synced = self.row;
        }
        let ready = Ready { row, cells, syncs };
        self.queue.push(ready, &mut self.spare)
    }

    /// Encrypts the data cells of the next row, and computes the parity cells.
    fn complete(
        &self,
        roles: &Roles,
        data: Vec<Cell>,
        parity: Vec<Cell>,
    ) -> Result<Vec<(usize, Cell)>, WriteError> {
        let (row, parcel, generation) = (self.row, &self.header.parcel, &self.generation);
        let name = |device, kind| row::name(parcel, generation, (row, device), kind);
        let keys = &self.keys;
        let mut data: Vec<(usize, Cell)> = roles.data.iter().copied().zip(data).collect();
        in_parallel(&mut data, |(device, cell)| {
            let name = name(*device, Kind::Data);
            let key = keys.get(*device).ok_or(WriteError::Full)?;
            key.seal(&name, cell.body_mut())?;
            cell.finish(&name);
            Ok(())
        })?;
        let mut parity: Vec<(usize, Cell)> = roles.parity.iter().copied().zip(parity).collect();
        let bodies: Vec<Option<&[u8]>> = data.iter().map(|(_, cell)| Some(cell.body())).collect();
        let compute = [parity::p, parity::q];
        in_parallel(
            parity.iter_mut().zip(compute),
            |((device, cell), compute)| {
                compute(&bodies, cell.body_mut());
                cell.finish(&name(*device, Kind::Parity));
                Ok(())
            },
        )?;
        data.extend(parity);
        Ok(data)
    }

    /// Makes everything durable that was put. The rest of the last row stays empty.
    ///
    /// # Errors
    /// When the devices are full, or cannot be written.
    pub fn sync(&mut self) -> Result<Position, WriteError> {
        // The rest of the last row has no records.
        while !self.log.is_empty() || !self.pending.is_empty() {
            let mut last = None;
            let spare = &mut self.spare;
            self.log.finish(|plain| {
                last = Some(cell_of(plain, spare));
                Ok::<_, WriteError>(())
            })?;
            self.add(last.unwrap_or_default())?;
        }
        if self.is_begun {
            self.sync_devices()?;
            self.durable.end = self.row;
        }
        Ok(self.durable)
    }

    /// Makes everything durable, reads all of it back from the devices, and seals the parcel.
    /// `progress` is called with the number of rows read.
    ///
    /// # Errors
    /// When anything read back is not as it was written, or the devices cannot be written.
    pub fn seal(mut self, progress: &mut dyn FnMut(u64)) -> Result<(Parcel, Position), WriteError> {
        let position = self.sync()?;
        self.forget()?;
        let mut header = self.header.clone();
        if self.is_begun {
            header.earlier.push(Earlier {
                generation: header.generation,
                nonce: header.nonce,
                devices: header.devices.clone(),
                first: header.row,
                end: position.end,
            });
            header.generation += 1;
            header.nonce = Bytes16::draw()?;
            header.row = self.row;
        }
        header.sealed = true;
        let sealed = Parcel::of(self.queue.take_devices(), header.clone())?;
        let report = sealed.verify_rows(progress);
        if !report.is_clean() {
            return Err(WriteError::Damaged(Box::new(report)));
        }
        self.queue = Queue::of(sealed.into_devices());
        self.write_header(&header)?;
        self.sync_devices()?;
        self.forget()?;
        let position = Position {
            header: header.row,
            end: header.row + 1,
        };
        let sealed = Parcel::of(self.queue.take_devices(), header)?;
        let mut report = Report::default();
        sealed.verify_header(&mut report);
        match report.is_clean() {
            true => Ok((sealed, position)),
            false => Err(WriteError::Damaged(Box::new(report))),
        }
    }

    /// Lets what is read next come from the devices.
    fn forget(&self) -> Result<(), WriteError> {
        for (number, device) in self.queue.devices().iter().enumerate() {
            device.forget().map_err(io_of(number, device))?;
        }
        Ok(())
    }
}

/// Returns the header of a new parcel.
fn first_header(
    devices: &[Device],
    settings: &Settings,
    key: &DataKey,
) -> Result<Header, WriteError> {
    check_name(&settings.name)?;
    let cells: Vec<u64> = devices.iter().map(Device::capacity).collect();
    let layout = Layout::new(&cells, settings.parity)?;
    Ok(Header {
        parcel: ParcelId(Bytes16::draw()?),
        name: settings.name.clone(),
        to: settings.to.clone(),
        created: settings.now,
        device: 0,
        devices: layout.cells().to_vec(),
        parity: settings.parity,
        row: 0,
        generation: 1,
        nonce: Bytes16::draw()?,
        key: key.fingerprint()?,
        earlier: Vec::new(),
        sealed: false,
    })
}

pub(crate) fn io_of(number: usize, device: &Device) -> impl Fn(io::Error) -> WriteError {
    let path = device.path().to_path_buf();
    move |error| WriteError::Io {
        device: number,
        path: path.clone(),
        error,
    }
}

/// Returns whether a device has what was durable on it: cells up to the position, and in the first
/// and the last row of its generation none of another one. They may be damaged.
fn is_as_it_was(
    device: &Device,
    written: u64,
    (position, cells, generation): (Position, u64, u32),
) -> io::Result<bool> {
    for row in [position.header, position.end.saturating_sub(1)] {
        if row >= cells {
            continue;
        }
        let is_it = match device.peek(row)? {
            Some(name) => name.generation == generation,
            None => row < written,
        };
        if !is_it {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns a cell with a plaintext, in the memory of a spare one if there is one.
fn cell_of(plain: &[u8], spare: &mut Vec<Cell>) -> Cell {
    let mut cell = spare.pop().unwrap_or_default();
    let body = cell.body_mut().get_mut(..plain.len());
    body.unwrap_or_default().copy_from_slice(plain);
    cell
}

/// Calls a function for each item, at the same time.
pub(crate) fn in_parallel<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    each: impl Fn(T) -> Result<R, WriteError> + Sync,
) -> Result<Vec<R>, WriteError> {
    let done = row::in_threads(items.into_iter().collect(), each);
    done.into_iter().collect()
}

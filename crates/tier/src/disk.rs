//! Tiles in files: one file an object, hashed, reserved ahead, and cleaned up.

use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate, fdatasync, fstat};
use rustix::io::Errno;
use shardwise_core::IO_ALIGNMENT;
use xxhash_rust::xxh3::xxh3_64;

use crate::Result;
use crate::buffer::{Buffer, Pool};
use crate::config::TierConfig;
use crate::error::{Access, TierError};
use crate::folder::RankFolder;
use crate::method::{OpenFile, Wait};
use crate::names;
use crate::object::{ObjectId, Objects, no_tile};
use crate::open::{self, create, free_bytes};
use crate::queue::{Progress, Queue, Transfer};
use crate::stats::TierStats;
use crate::testing::Faults;

/// How long a tier that is dropped waits for what it has in flight.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Reads that nobody will wait for, by transfer. Shared with the [`Reading`](crate::Reading)s, which add themselves when
/// they are dropped.
pub(crate) type Abandoned = Arc<Mutex<Vec<usize>>>;

/// A tier's tiles in files.
pub(crate) struct Disk {
    rank: usize,
    pool: Arc<Pool>,
    queue: Queue,
    objects: Objects<Object>,
    abandoned: Abandoned,
    finished: Vec<usize>,
    /// The first failed write that nobody has been told of.
    kept: Option<TierError>,
    faults: Option<Faults>,
    direct: bool,
    why: Option<String>,
    /// Whether the file system can reserve space.
    reserves: bool,
    stats: TierStats,
    /// How long to wait for a tile.
    deadline: Duration,
    /// Last: its drop removes what the others leave.
    folder: RankFolder,
}

#[derive(Debug)]
struct Object {
    file: Arc<OpenFile>,
    tiles: Vec<Tile>,
    /// Bytes from the file's start that are reserved.
    reserved: u64,
    unsynced: bool,
}

#[derive(Debug, Default)]
struct Tile {
    content: Content,
    /// The write that is in flight.
    writing: Option<usize>,
}

#[derive(Debug, Default, Clone)]
enum Content {
    /// Never written: zeros.
    #[default]
    Fresh,
    Written {
        len: usize,
        hash: u64,
    },
    /// A write failed, so nobody knows what is there.
    Lost(Box<TierError>),
}

impl Disk {
    pub(crate) fn open(
        config: &TierConfig,
        path: &std::path::Path,
        pool: Arc<Pool>,
        faults: Option<Faults>,
    ) -> Result<Self> {
        open::raise_descriptors();
        let folder = RankFolder::take(path, &format!("rank {}", config.rank))?;
        let found = open::find(config, folder.path(), faults.as_ref())?;
        Ok(Self {
            rank: config.rank,
            deadline: config.deadline,
            pool,
            queue: Queue::new(found.method, faults.clone(), config.io.block_bytes),
            objects: Objects::new(config.rank),
            abandoned: Abandoned::default(),
            finished: Vec::new(),
            kept: None,
            faults,
            direct: found.direct,
            why: found.why,
            reserves: true,
            stats: TierStats::default(),
            folder,
        })
    }

    pub(crate) fn method(&self) -> &'static str {
        self.queue.method()
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }

    pub(crate) fn why(&self) -> Option<&str> {
        self.why.as_deref()
    }

    pub(crate) fn stats(&self) -> TierStats {
        TierStats { busy: self.queue.busy(), ..self.stats }
    }

    pub(crate) fn abandoned(&self) -> &Abandoned {
        &self.abandoned
    }

    pub(crate) fn create(&mut self, id: &str, tiles: usize) -> Result<ObjectId> {
        self.objects.check_new(id)?;
        let path = self.folder.path().join(names::tiles_file(id));
        let fd = create(self.rank, &path, self.direct)?;
        let file = Arc::new(OpenFile { fd, path });
        let tiles = (0..tiles).map(|_| Tile::default()).collect();
        Ok(self.objects.insert(id, Object { file, tiles, reserved: 0, unsynced: false }))
    }

    /// Learns what has ended, and returns a failure that is due.
    pub(crate) fn look(&mut self) -> Result<()> {
        self.pump(Wait::No)?;
        match self.kept.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Waits until a buffer becomes free; an error if none will.
    pub(crate) fn wait_for_buffer(&mut self) -> Result<()> {
        let mut frees = 0;
        let mut reading = 0;
        for (_, transfer) in self.queue.iter() {
            match transfer.access {
                Access::Read if !transfer.abandoned => reading += 1,
                _ => frees += 1,
            }
        }
        if frees == 0 {
            let (count, bytes) = (self.pool.count(), self.pool.bytes());
            let held = count.saturating_sub(reading);
            return Err(TierError::NoBuffer { rank: self.rank, count, bytes, reading, held });
        }
        let end = Instant::now() + self.deadline;
        let finished = |disk: &Self| disk.queue.iter().filter(|(_, t)| t.is_finished()).count();
        let before = (self.queue.unfinished(), finished(self));
        self.stand_still(|disk| {
            disk.pump(Wait::Until(end))?;
            let progress = (disk.queue.unfinished(), finished(disk)) != before || Instant::now() < end;
            if progress { Ok(()) } else { Err(disk.late(|_| true)) }
        })
    }

    /// Begins to read a tile into `buffer`; gives the buffer back, with zeros or nothing in it, where there is nothing to
    /// read.
    pub(crate) fn start_read(
        &mut self,
        object: ObjectId,
        tile: usize,
        mut buffer: Buffer,
    ) -> Result<std::result::Result<usize, Buffer>> {
        let found = self.tile(object, tile)?;
        if let Some(writing) = found.writing {
            self.wait_for(writing)?;
        }
        let (len, hash) = match self.tile(object, tile)?.content.clone() {
            Content::Fresh => {
                buffer.as_mut_slice().fill(0);
                return Ok(Err(buffer));
            }
            Content::Lost(error) => {
                // It is told now.
                self.kept.take_if(|kept| *kept == *error);
                return Err(*error);
            }
            Content::Written { len, hash } => (len, hash),
        };
        self.check_there(object, tile)?;
        self.stats.reads += 1;
        self.stats.read_bytes += len as u64;
        if len == 0 {
            buffer.set_len(0);
            return Ok(Err(buffer));
        }
        let Some(memory) = buffer.into_memory() else { return Err(self.lost_buffer()) };
        let file = self.objects.get(object)?.file.clone();
        let key = self.queue.add(Transfer {
            access: Access::Read,
            object,
            tile,
            file,
            offset: self.offset(tile),
            cut: memory.fill(padded(len)),
            len,
            hash,
            abandoned: false,
            progress: Progress::default(),
        });
        if let Err(error) = self.pump(Wait::No) {
            self.abandoned.lock().unwrap_or_else(PoisonError::into_inner).push(key);
            return Err(error);
        }
        Ok(Ok(key))
    }

    /// Waits for a read and checks it.
    pub(crate) fn wait_read(&mut self, key: usize) -> Result<Buffer> {
        self.wait_for(key)?;
        let Some(transfer) = self.queue.take(key) else { return Err(self.lost_buffer()) };
        let error = transfer.error(self.rank);
        let Transfer { len, hash, offset, file, cut, .. } = transfer;
        let memory = cut.join().map_err(|_| self.lost_buffer())?;
        // Dropped on an error, and so given back.
        let buffer = self.pool.wrap(memory, len);
        if let Some(error) = error {
            return Err(error);
        }
        let found = xxh3_64(buffer.as_slice());
        if found != hash {
            return Err(TierError::Corrupt {
                rank: self.rank,
                file: file.path.clone(),
                offset,
                bytes: len as u64,
                expected: hash,
                found,
            });
        }
        Ok(buffer)
    }

    /// Begins to write a tile; the buffer goes back to the pool by itself.
    pub(crate) fn start_write(&mut self, object: ObjectId, tile: usize, mut buffer: Buffer) -> Result<()> {
        self.tile(object, tile)?;
        self.wait_for_all(|t| t.object == object && t.tile == tile)?;
        self.check_there(object, tile)?;
        let len = buffer.len();
        self.stats.writes += 1;
        self.stats.written_bytes += len as u64;
        if len == 0 {
            self.tile(object, tile)?.content = Content::Written { len: 0, hash: xxh3_64(&[]) };
            return Ok(());
        }
        self.reserve(object, tile, padded(len) as u64)?;
        buffer.set_len(padded(len));
        buffer.as_mut_slice()[len..].fill(0);
        let Some(memory) = buffer.into_memory() else { return Err(self.lost_buffer()) };
        let file = self.objects.get(object)?.file.clone();
        let key = self.queue.add(Transfer {
            access: Access::Write,
            object,
            tile,
            file,
            offset: self.offset(tile),
            cut: memory.store(padded(len)),
            len,
            hash: 0,
            abandoned: false,
            progress: Progress::default(),
        });
        self.objects.get(object)?.unsynced = true;
        let found = self.tile(object, tile)?;
        found.writing = Some(key);
        // The disk works while the hash is computed.
        let begun = self.queue.pump(Wait::No);
        let hash = self.queue.get(key).and_then(|t| Some(xxh3_64(&t.cut.stored()?[..len])));
        if let Some(hash) = hash {
            self.tile(object, tile)?.content = Content::Written { len, hash };
        }
        begun.map_err(|errno| self.system(errno))?;
        self.settle();
        Ok(())
    }

    /// Waits for all writes.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.wait_for_all(|t| t.access == Access::Write)
    }

    /// Has the system bring all files to the disk.
    pub(crate) fn sync(&mut self) -> Result<()> {
        let rank = self.rank;
        self.stand_still(|disk| {
            for object in disk.objects.iter_mut().filter(|object| object.unsynced) {
                fdatasync(&object.file.fd).map_err(|errno| TierError::Io {
                    rank,
                    file: object.file.path.clone(),
                    access: Access::Write,
                    offset: 0,
                    bytes: object.reserved,
                    cause: errno.to_string(),
                })?;
                object.unsynced = false;
            }
            Ok(())
        })
    }

    pub(crate) fn remove(&mut self, object: ObjectId) {
        // A system that does not answer any more: the file goes all the same.
        let _ = self.wait_for_all(|t| t.object == object);
        if let Some(object) = self.objects.remove(object) {
            let _ = fs::remove_file(&object.file.path);
        }
    }

    fn offset(&self, tile: usize) -> u64 {
        tile as u64 * self.pool.bytes() as u64
    }

    fn tile(&mut self, object: ObjectId, tile: usize) -> Result<&mut Tile> {
        let rank = self.rank;
        let (id, object) = self.objects.named(object)?;
        let count = object.tiles.len();
        if tile >= count {
            return Err(no_tile(rank, id, tile, count));
        }
        Ok(&mut object.tiles[tile])
    }

    /// Refuses a file that has lost its name: what is written to it would be lost as well.
    fn check_there(&mut self, object: ObjectId, tile: usize) -> Result<()> {
        let (rank, offset) = (self.rank, self.offset(tile));
        let file = &self.objects.get(object)?.file;
        match fstat(&file.fd) {
            Ok(found) if found.st_nlink > 0 => Ok(()),
            _ => Err(TierError::Deleted { rank, file: file.path.clone(), offset }),
        }
    }

    /// Reserves space before a tile is first written: for all tiles but the last one at once, since a file that grows
    /// waits for what is in flight in it.
    fn reserve(&mut self, object: ObjectId, tile: usize, bytes: u64) -> Result<()> {
        let (rank, reserves) = (self.rank, self.reserves);
        let end = self.offset(tile) + bytes;
        let found = self.objects.get(object)?;
        if !reserves || end <= found.reserved {
            return Ok(());
        }
        let all_but_last = (found.tiles.len() as u64 - 1) * self.pool.bytes() as u64;
        let end = end.max(all_but_last);
        let (offset, needed) = (found.reserved, end - found.reserved);
        let reserved = loop {
            let reserved = self.faults.as_ref().map_or(Ok(()), Faults::reserve);
            match reserved.and_then(|()| fallocate(&found.file.fd, FallocateFlags::empty(), offset, needed)) {
                Err(Errno::INTR) => {}
                other => break other,
            }
        };
        let file = found.file.path.clone();
        match reserved {
            Ok(()) => found.reserved = end,
            Err(Errno::NOSPC | Errno::DQUOT) => {
                let free = free_bytes(&found.file.fd);
                return Err(TierError::Full { rank, file, offset, needed, free });
            }
            // Space is then taken as it is written.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => self.reserves = false,
            Err(errno) => {
                let cause = format!("reserving space: {errno}");
                let access = Access::Write;
                return Err(TierError::Io { rank, file, access, offset, bytes: needed, cause });
            }
        }
        Ok(())
    }

    fn pump(&mut self, wait: Wait) -> Result<()> {
        let pumped = self.queue.pump(wait);
        self.settle();
        pumped.map_err(|errno| self.system(errno))
    }

    /// Draws the consequences of what has ended and of what was abandoned.
    fn settle(&mut self) {
        for key in self.abandoned.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            if let Some(transfer) = self.queue.get(key) {
                transfer.abandoned = true;
                self.finished.push(key);
            }
        }
        self.queue.drain_finished(&mut self.finished);
        for key in std::mem::take(&mut self.finished) {
            let Some(transfer) = self.queue.get(key) else { continue };
            let is_wanted = transfer.access == Access::Read && !transfer.abandoned;
            if is_wanted {
                continue;
            }
            let Some(transfer) = self.queue.take(key) else { continue };
            let error = transfer.error(self.rank);
            if transfer.access == Access::Write
                && let Ok(tile) = self.tile(transfer.object, transfer.tile)
            {
                tile.writing = None;
                if let Some(error) = &error {
                    tile.content = Content::Lost(Box::new(error.clone()));
                }
                self.kept = self.kept.take().or(error);
            }
            if let Ok(memory) = transfer.cut.join() {
                self.pool.put(memory);
            }
        }
    }

    fn wait_for(&mut self, key: usize) -> Result<()> {
        if self.queue.is_finished(key) {
            return Ok(());
        }
        let end = Instant::now() + self.deadline;
        self.stand_still(|disk| {
            while !disk.queue.is_finished(key) {
                disk.pump(Wait::Until(end))?;
                if Instant::now() >= end && !disk.queue.is_finished(key) {
                    return Err(disk.late(|other| other == key));
                }
            }
            Ok(())
        })
    }

    /// The error for a transfer that does not end.
    fn late(&self, which: impl Fn(usize) -> bool) -> TierError {
        let (rank, waited) = (self.rank, self.deadline);
        let stuck = self.queue.iter().find(|(key, t)| which(*key) && !t.is_finished());
        match stuck {
            Some((_, Transfer { file, access, offset, len, .. })) => TierError::Late {
                rank,
                file: file.path.clone(),
                access: *access,
                offset: *offset,
                bytes: *len as u64,
                waited,
            },
            None => self.system(Errno::TIMEDOUT),
        }
    }

    /// Waits for all transfers of a kind.
    fn wait_for_all(&mut self, of_kind: impl Fn(&Transfer) -> bool) -> Result<()> {
        loop {
            let next = self.queue.iter().find(|(_, t)| !t.is_finished() && of_kind(t)).map(|(key, _)| key);
            match next {
                Some(key) => self.wait_for(key)?,
                None => return Ok(()),
            }
        }
    }

    /// Counts the time that `body` takes as waiting.
    fn stand_still<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let start = Instant::now();
        let result = body(self);
        self.stats.wait += start.elapsed();
        result
    }

    fn system(&self, errno: Errno) -> TierError {
        TierError::System {
            rank: self.rank,
            what: format!("{} does not work any more", self.queue.method()),
            cause: errno.to_string(),
        }
    }

    fn lost_buffer(&self) -> TierError {
        TierError::System {
            rank: self.rank,
            what: "a buffer is still in use that nothing should use".into(),
            cause: "this is an error in this program".into(),
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let end = Instant::now() + LAST_WAIT;
        while self.queue.unfinished() > 0 && Instant::now() < end {
            if self.pump(Wait::Until(end)).is_err() {
                break;
            }
        }
        for object in self.objects.drain() {
            let _ = fs::remove_file(&object.file.path);
        }
    }
}

fn padded(len: usize) -> usize {
    len.next_multiple_of(IO_ALIGNMENT)
}
